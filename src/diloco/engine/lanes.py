"""Lanes: where work runs that training does not wait for."""

from collections.abc import Callable
from concurrent.futures import Future
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
    """A place for work: a thread on a CPU, a stream and an event on a GPU."""

    def run(self, work: Callable[[], T]) -> Handle[T]:
        """Start the work and return at once."""
        ...


class ThreadLane:
    """A daemon thread for each piece of work.

    >>> ThreadLane().run(lambda: 1 + 1).wait()
    2
    """

    def run(self, work: Callable[[], T]) -> Handle[T]:
        """Start a thread."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # raised again where the training loop waits
                result.set_exception(error)

        Thread(target=run, name="diloco lane", daemon=True).start()
        return _Threaded(result)


class _Threaded(Generic[T]):
    def __init__(self, result: "Future[T]") -> None:
        self._result = result

    def wait(self) -> T:
        return self._result.result()
