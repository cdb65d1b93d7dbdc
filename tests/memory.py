"""The memory of Python's objects while a test runs."""

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.rendezvous.log_thread import Background


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Fail if the objects made in this context take `num_bytes` or more at any time.

    No request to a store may be under way: one that ends while tracing stops crashes Python (CPython's gh-128679,
    mended in 3.12.9 and 3.13.2).
    """
    assert not list(backgrounds()), "end them before"
    tracemalloc.start()
    try:
        yield
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < num_bytes


def backgrounds() -> Iterator[Background]:
    """The loops of this process that talk to a store."""
    for thread in threading.enumerate():
        serve = getattr(thread, "_target", None)
        if isinstance(background := getattr(serve, "__self__", None), Background):
            yield background
