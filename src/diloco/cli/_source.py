"""The source that a command reads: a file or a directory, or the store in which replicas meet."""

from pathlib import Path
from typing import Annotated

import tyro

Run = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
"""A run on a command line: its directory, or the URL of its store."""


def source(text: str) -> Path | str:
    """The path that a command line names; a string if it is a store with a run, as the library takes its URL."""
    from diloco.rendezvous.log.log import is_store

    return text if is_store(text) else Path(text)
