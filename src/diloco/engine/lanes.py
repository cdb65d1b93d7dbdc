"""Lanes: where work runs that training does not wait for."""

from collections.abc import Callable
from threading import Thread
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """Work under way."""

    def wait(self) -> T_co:
        """The result, once the work is done; raises what the work raised."""
        ...


class Lane(Protocol):
    """A place for work: a thread here, a stream and an event on a GPU."""

    def run(self, work: Callable[[], T]) -> Handle[T]:
        """Start the work and return at once."""
        ...


class ThreadLane:
    """A daemon thread for each piece of work.

    Args:
        name: of the threads.

    >>> ThreadLane("sum").run(lambda: 1 + 1).wait()
    2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, work: Callable[[], T]) -> Handle[T]:
        """Start a thread."""
        return _Threaded(work, self._name)


class _Threaded(Generic[T]):
    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._result: list[T] = []
        self._error: Exception | None = None

        def run() -> None:
            try:
                self._result.append(work())
            except Exception as error:  # raised again where the training loop waits
                self._error = error

        self._thread = Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]
