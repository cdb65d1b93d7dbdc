"""Files that are whole or absent when the process is killed, their digests; optional libraries; memory, cores."""

import errno
import hashlib
import importlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from diloco.errors import FileError, FileWriteError, MissingLibraryError, UserError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Name a file, and the bytes that it needs, in the operating system's refusal to write it.

    Args:
        path: of the file, or of a directory.
        num_bytes: size of the file; None where it is unknown.

    Raises:
        FileWriteError: in place of any OSError.
    """
    try:
        yield
    except FileWriteError:
        raise
    except (OSError, SafetensorError) as error:
        number = os_error(error)
        if number is None and not isinstance(error, OSError):
            raise
        reason = os.strerror(number) if number is not None else str(error)
        needs = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and num_bytes is not None
        size = f" (needs {num_bytes:,} bytes)" if needs else ""
        raise FileWriteError(f"can't write {path}: {reason[:1].lower()}{reason[1:]}{size}") from error


@contextmanager
def reading(source: Path | str, *fields: str) -> Iterator[None]:
    """Name a file in whatever error a library raises that reads it: those of damaged files are of any class.

    Args:
        source: the file, or what the sentence is to begin with.
        fields: the settings that name it.

    Raises:
        FileError: in the place of any error.
    """
    try:
        yield
    except Exception as error:
        named = error.fields if isinstance(error, UserError) and error.fields else fields
        raise FileError(f"{source} can't be read: {_reason(error)}", *named) from error


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8; convert it, or name other files"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]


def os_error(error: Exception) -> int | None:
    """The number of the operating system's error, which a library that is written in Rust has in its words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error ([0-9]+)\)", str(error))
    return int(match[1]) if match else None


def make_directory(path: Path) -> None:
    """Make a directory, and those that it is in, unless it is there.

    Raises:
        FileWriteError: if it can't be made.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks`, one after another, to `path`: first under another name, which is renamed once on disk.

    A symbolic link stays, and what it points to is written.

    Raises:
        FileWriteError: if it can't be written; nothing is left of it.
    """
    if not path.name:
        raise FileWriteError(f"can't write {path}: it is a directory")
    target = Path(os.path.realpath(path))
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")  # several may write it at once
    size = sum(memoryview(chunk).nbytes for chunk in chunks) if isinstance(chunks, Sequence) else None
    with writing(path, size):
        try:
            _write_durably(partial, chunks)
            partial.replace(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        # Otherwise a power failure could undo the rename, though not the writes before it.
        sync(target.parent)


def create(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Create a file, and the directories that it is in: it is whole and on disk before its name shows.

    Raises:
        FileExistsError: if its name is taken.
        OSError: if it can't be written; nothing is left of it.
    """
    partial = path.with_name(f"{path.name}#{secrets.randbelow(1 << 60)}")  # a name that no list of a store shows
    try:
        try:
            _write_durably(partial, chunks)
        except FileNotFoundError:
            _make_durably(path.parent)
            _write_durably(partial, chunks)
        os.link(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    sync(path.parent)


def remove_abandoned(directory: Path, *, seconds: float) -> None:
    """Remove what `create` has left in a directory, and below it, where its process was killed.

    Args:
        directory: with the files.
        seconds: the time for which nothing was written to such a file.
    """
    for folder, _, names in os.walk(directory):
        # Others may have files here with a short number; hardly any of `create` has one.
        for path in [Path(folder, name) for name in names if re.fullmatch(r".+#[0-9]{15,}", name)]:
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - seconds:
                    path.unlink()


def _write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that is not there, and wait until it is on disk."""
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _make_durably(directory: Path) -> None:
    """Make a directory, and those that it is in, unless it is there, and wait until their names are on disk."""
    if directory.is_dir():
        return
    _make_durably(directory.parent)
    try:
        directory.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)) from None
    sync(directory.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all; errors as for `write_atomically`.

    Raises:
        UserError: if a text in it has bytes in the place of letters, as the names of some files do.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        start, stop = (text.rfind('"', 0, error.start) + 1, text.find('"', error.start))
        raise UserError(f"{path} can't be written: {_not_unicode(text[start:stop])}") from None
    write_atomically(path, [content + b"\n"])


def _not_unicode(name: str) -> str:
    """The reason why a name that a program was given is no text, and a remedy."""
    as_utf8 = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    if as_utf8.encode(errors="surrogateescape") == name.encode(errors="surrogateescape"):
        return f"{as_utf8} has letters that this locale lacks: set PYTHONUTF8=1 in the environment"
    return f"the name {as_utf8} is not UTF-8: rename it (a source of text may be a directory or a glob, too)"


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as a file of safetensors.

    Raises:
        FileWriteError: if it can't be written, with its size.
    """
    from safetensors.torch import save_file

    with writing(path, sum(tensor.nbytes for tensor in tensors.values())):
        path.touch()
        mode = path.stat().st_mode  # the library makes a file that nobody else may read
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
        path.chmod(mode)


def safetensors_head(entries: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The head of a safetensors file: the length of its JSON, uint64 little-endian, and this, padded to 8 bytes.

    Args:
        entries: name, type, shape and number of bytes of each tensor, in the order of the file.
    """
    described, start = {}, 0
    for name, dtype, shape, num_bytes in entries:
        stop = start + num_bytes
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_json(whole: memoryview, *, most_bytes: int) -> bytes | None:
    """The JSON in the head of bytes that nobody has checked; None if they do not begin as a safetensors file."""
    length = int.from_bytes(whole[:8], "little")
    return bytes(whole[8 : 8 + length]) if 0 < length <= min(most_bytes, whole.nbytes - 8) else None


def copy(source: Path, directory: Path) -> None:
    """Copy a file into a directory.

    Raises:
        FileWriteError: if it can't be written.
    """
    with writing(directory / source.name, source.stat().st_size):
        shutil.copy(source, directory)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have none for directories
            raise
    finally:
        os.close(descriptor)


def sha256(*contents: "Path | Buffer") -> str:
    """The SHA-256, in hexadecimal, of the bytes of files and buffers, one after another."""
    digest = hashlib.sha256()
    for content in contents:
        if isinstance(content, Path):
            with content.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        else:
            digest.update(content)
    return digest.hexdigest()


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def expanded(path: str | Path) -> Path:
    """A path whose `~` or `~user` is replaced by the home directory.

    Raises:
        UserError: if there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}") from error


def require(module: str, *, extra: str) -> Any:
    """Import `module` from a library that diloco's optional dependencies `extra` install.

    Raises:
        MissingLibraryError: if the library is not installed.
    """
    with requiring(module.partition(".")[0], extra=extra):
        return importlib.import_module(module)


@contextmanager
def requiring(*libraries: str, extra: str) -> Iterator[None]:
    """Import from libraries that diloco's optional dependencies `extra` install.

    Raises:
        MissingLibraryError: if one of the libraries is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in libraries:
            raise
        raise MissingLibraryError(f"{error.name} is not installed: run pip install 'diloco[{extra}]'") from error
