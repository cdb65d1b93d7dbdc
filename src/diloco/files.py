"""Files that are whole or absent whenever the process is killed, their digests, and optional libraries."""

import hashlib
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diloco.errors import UserError


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks`, one after another, to `path`: under another name first, renamed once on disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    # Without it a power failure may undo the rename, though not the writes before it.
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require(module: str, *, extra: str) -> Any:
    """Import `module`, a part of a library that the extra `extra` of diloco installs.

    Raises:
        UserError: if the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name != library:
            raise
        raise UserError(f"{library} is needed here: pip install '.[{extra}]' in diloco's clone") from error
