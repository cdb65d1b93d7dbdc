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
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    # Without it a power failure may undo the rename, though not the writes before it.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
