"""Files that are whole or absent whenever the process is killed, their digests, and optional libraries."""

import hashlib
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diloco.errors import UserError


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks`, one after another, to `path`: first under another name, which is renamed once on disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    # Otherwise a power failure could undo the rename, though not the writes before it.
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(*paths: Path) -> str:
    """The SHA-256, in hexadecimal, of the bytes of files, one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


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
        UserError: if the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name != library:
            raise
        raise UserError(f"{library} is not installed: run pip install '.[{extra}]' in diloco's clone") from error
