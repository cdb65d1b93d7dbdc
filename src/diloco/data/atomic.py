"""Files that are either whole or absent, whatever moment the process is killed at."""

import os
from collections.abc import Iterable
from pathlib import Path


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
