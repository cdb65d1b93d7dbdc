"""Documents of text, streamed from the standard library, from files, or from the Hugging Face Hub."""

import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from diloco.data.readers import SUFFIXES, Document, Piece, Reading, given, suffixes_of
from diloco.data.readers import pieces as pieces_of_files
from diloco.errors import UserError
from diloco.files import expanded, require, sha256
from diloco.hub import check_reachable, is_offline, not_here


def documents(source: str, reading: Reading = Reading()) -> Iterator[Document]:  # noqa: B008
    """Stream the documents of `source`, always in the same order.

    `source` is one of

    - `stdlib`: each module of the running Python's standard library, tests left out;
    - a file, a glob (`~` and `**` are understood), or a directory, which stands for all files below it that can
      be read, hidden ones left out: `.txt` (one document per file), `.jsonl`, `.csv` or `.parquet` (one per row,
      and its `id` where it has one); all but `.parquet` also as `.gz` or `.zst`; in capitals, too;
    - `hf:NAME[:CONFIG][:SPLIT]`: a dataset of the Hugging Face Hub, split `train` by default.

    Compressed text is read in pieces: a document takes a small multiple of `reading.longest_bytes` at the most.
    The libraries that read Parquet and the Hub take what a file asks for.

    Args:
        source: as above.
        reading: the field that holds a row's text, and the longest document.

    Raises:
        UserError: if nothing matches, a suffix is unknown, a file or row can't be read, or one is longer.
    """
    return chain.from_iterable(piece.documents(reading) for piece in pieces(source, reading))


def pieces(source: str, reading: Reading) -> Iterator[Piece]:
    """The documents of `source`, as `documents` gives them, in pieces that are cut alike each time.

    Raises:
        UserError: as `documents` does, but for what parsing a piece refuses.
    """
    if source == "stdlib":
        return given(_stdlib())
    if source.startswith("hf:"):
        return given(_hub(source, reading))
    root, paths = _match(source)
    return pieces_of_files(((path, path.relative_to(root).as_posix()) for path in paths), reading)


def num_bytes(source: str) -> int | None:
    """Bytes of the files of a source; None where they are not known."""
    if source == "stdlib" or source.startswith("hf:"):
        return None
    return sum(path.stat().st_size for path in _match(source)[1])


def fingerprint(source: str) -> list[Any]:
    """Facts that change with the text of `source`: Python's version, files' sizes and times, a dataset's name."""
    return _facts(source, lambda path: [path.stat().st_size, path.stat().st_mtime_ns])


def content(source: str) -> list[Any]:
    """The text of `source` wherever it lies: Python's version, each file's SHA-256, a dataset's name.

    A dataset of the Hub is taken to be as constant as its name.
    """
    return _facts(source, lambda path: [file_digest(path)])


def _facts(source: str, of_file: Callable[[Path], list[Any]]) -> list[Any]:
    if source == "stdlib":
        return [source, platform.python_version()]
    name = [source] if source.startswith("hf:") else []  # its documents are named by that
    if _is_of_the_hub(source):
        return name
    root, paths = _files(source)
    return [*name, *([path.relative_to(root).as_posix(), *of_file(path)] for path in paths)]


def parts(source: str) -> list[str]:
    """The parts of a source, each under one name however it was asked for: files by path, a dataset's split."""
    if source == "stdlib":
        return [source]
    if source.startswith("hf:"):
        return [":".join(["hf", *(part or "" for part in _parse_hub(source))])]
    return [str(path.resolve()) for path in _match(source)[1]]


def left_out(source: str) -> list[str]:
    """The files of a directory, hidden ones aside, that are not read, since their suffixes are not known."""
    directory = expanded(source)
    if source == "stdlib" or source.startswith("hf:") or not directory.is_dir():
        return []
    others = [path for path in _visible(directory) if suffixes_of(path) is None]
    return [path.relative_to(directory).as_posix() for path in others]


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; it is read again only when its size or time has changed."""
    stat = path.stat()
    return _digest_at(path.absolute(), stat.st_size, stat.st_mtime_ns)


@cache
def _digest_at(path: Path, size: int, modified_ns: int) -> str:
    return sha256(path)


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.isdisjoint(relative.parts):
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            yield Document(relative.as_posix(), text)


def _hub(source: str, reading: Reading) -> Iterator[Document]:
    """The documents of a data set on the Hugging Face Hub."""
    name, config, split = _parse_hub(source)
    load_dataset = require("datasets", extra="hub").load_dataset
    if _is_of_the_hub(source):
        check_reachable(source)
    try:
        rows = enumerate(load_dataset(name, config, split=split, streaming=True), start=1)
        yield from reading.documents(rows, name=source, noun="row")
    except Exception as error:  # an unknown name, configuration or split; no network; a damaged file: of any class
        if is_offline() and "OfflineMode" in str(error):
            raise not_here(source) from error
        if "scripts are no longer supported" in str(error):
            raise UserError(
                f"source {source!r} is loaded by a script of its own, which the library `datasets` refuses: "
                "download its files and name them"
            ) from error
        fields = error.fields if isinstance(error, UserError) else ()
        raise UserError(f"source {source!r} can't be read: {error}", *fields) from error


def _is_of_the_hub(source: str) -> bool:
    """True for a dataset that does not lie here: the library takes a directory's path for a name, too."""
    return source.startswith("hf:") and not Path(_parse_hub(source)[0]).exists()


def _files(source: str) -> tuple[Path, list[Path]]:
    """The files of a source that lie here, and the directory that their names are relative to."""
    if not source.startswith("hf:"):
        return _match(source)
    root = Path(_parse_hub(source)[0])
    return root, _visible(root)


def _parse_hub(source: str) -> tuple[str, str | None, str]:
    match source.split(":")[1:]:
        case [name] if name:
            return name, None, "train"
        case [name, config] if name:
            return name, config or None, "train"
        case [name, config, split] if name and split:
            return name, config or None, split
    raise UserError(f"source {source!r} is not of the form hf:NAME[:CONFIG][:SPLIT]")


def _match(source: str) -> tuple[Path, list[Path]]:
    """The directory that ids are relative to, and the files that `source` names, sorted."""
    if not source:
        raise UserError("a source of text is empty: name a file, a directory or a glob")
    pattern = expanded(source)
    try:
        if pattern.is_dir():
            return pattern, _files_below(pattern)
        if pattern.is_file():
            root, paths = pattern.parent, [pattern]
        else:
            root = Path(*takewhile(lambda part: not set("*?[") & set(part), pattern.parts[:-1]))
            paths = sorted({path for path in _glob(root, pattern.relative_to(root).parts) if path.is_file()})
    except (OSError, ValueError) as error:  # a directory closed to us, or a pattern that is none
        raise UserError(f"source {source!r} can't be looked up: {error}") from error
    if not paths and "://" in source:
        raise UserError(
            f"source {source!r} is a URL, and text is read from files of this machine: download it, or name a "
            "data set of the Hugging Face hub by hf:NAME"
        )
    if not paths:
        hub = "" if set("./*") & set(source) else f", or hf:{source} for that data set of the Hugging Face Hub"
        raise UserError(f"source {source!r} matches no file: name a file, or a glob such as 'texts/**/*.txt'{hub}")
    for path in paths:
        if suffixes_of(path) is None:
            raise UserError(f"{path} has none of the known suffixes: {', '.join(SUFFIXES)}")
    return root, paths


def _files_below(directory: Path) -> list[Path]:
    """The files of a directory that can be read, hidden ones left out, sorted."""
    paths = [path for path in _visible(directory) if suffixes_of(path) is not None]
    if not paths:
        raise UserError(f"the directory {directory} holds no file with a known suffix: {', '.join(SUFFIXES)}")
    return paths


def _visible(directory: Path) -> list[Path]:
    """The files of a directory, hidden ones left out, sorted."""
    return sorted(
        path
        for folder in _folders(directory)
        for path in folder.iterdir()
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )


def _glob(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The paths that match a pattern below a directory; `**` is every directory, those behind links too."""
    if "**" not in parts:
        yield from root.glob("/".join(parts))
        return
    place = parts.index("**")
    for base in root.glob("/".join(parts[:place])) if place else (root,):
        for folder in _folders(base) if base.is_dir() else ():
            yield from _glob(folder, parts[place + 1 :]) if parts[place + 1 :] else (folder,)


def _folders(directory: Path) -> Iterator[Path]:
    """A directory and those below it, behind symbolic links too, each once.

    Raises:
        OSError: if one may not be read.
    """
    seen: set[tuple[int, int]] = set()
    for folder, names, _ in os.walk(directory, onerror=_raise, followlinks=True):
        stat = Path(folder).stat()
        if (stat.st_dev, stat.st_ino) in seen:
            names.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        names.sort()
        yield Path(folder)


def _raise(error: OSError) -> None:
    raise error
