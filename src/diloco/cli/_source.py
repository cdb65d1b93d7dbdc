"""The source that a command reads: a file or a directory, or the store in which replicas meet."""

from pathlib import Path

from diloco.rendezvous.history import is_store


def source(text: str) -> Path | str:
    """The path that a command line names; a string if it is a store with a run, as the library takes its URL."""
    return text if is_store(text) else Path(text)
