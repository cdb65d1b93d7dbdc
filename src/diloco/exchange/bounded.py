"""Calls that end in time, whatever becomes of the process that they ask.

torch's stores wait without end, whatever their timeout, for the answer of a process that is stopped (SIGSTOP) or
whose machine hangs.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import ParamSpec, TypeVar

from diloco.errors import ExchangeError
from diloco.exchange.board import Store

P = ParamSpec("P")
T = TypeVar("T")


def within(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call. If the time is over first, the call goes on in a thread that nobody waits for.

    Raises:
        TimeoutError: if the time is over.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name="bounded call", daemon=True).start()
    return result.result(max(seconds, _SHORTEST_SECONDS))


class BoundedStore:
    """A store whose answers come by a deadline; a `Store`. Each call costs a thread: not for a training step.

    Args:
        store: the one to ask, which replica 0 holds.
        deadline: by `time.monotonic`.

    Each method raises ExchangeError if replica 0 is gone, or does not answer by the deadline.
    """

    def __init__(self, store: Store, deadline: float) -> None:
        self._store, self._deadline = store, deadline

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self._answer(self._store.set, key, value)

    def get(self, key: str, /) -> bytes:
        """A value that is there."""
        return self._answer(self._store.get, key)

    def add(self, key: str, number: int, /) -> int:
        """Add to a number, which begins at 0; the sum."""
        return self._answer(self._store.add, key, number)

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        return self._answer(self._store.check, keys)

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value if the present one is the expected one, "" for none; the value that then is there."""
        return self._answer(self._store.compare_set, key, expected, value)

    def _answer(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return within(self._deadline - time.monotonic(), call, *args, **kwargs)
        except ExchangeError:
            raise
        except TimeoutError:
            raise ExchangeError(
                "replica 0 does not answer: its process or its machine stands still", (0,)
            ) from None
        except RuntimeError as error:
            message = f"the connection to replica 0 broke off: {first_sentence(error)}"
            raise ExchangeError(message, (0,)) from None


def first_sentence(error: Exception) -> str:
    """The first sentence of a transport's message, without the place in its source."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (first.split("] ", 1)[-1] if first.startswith("[") else first).split(". ")[0]


_SHORTEST_SECONDS = 0.1
