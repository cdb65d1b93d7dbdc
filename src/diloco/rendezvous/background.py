"""An asyncio loop in a daemon thread, beside the training thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from diloco.errors import ExchangeError

_T = TypeVar("_T")


class Background:
    """A loop that runs from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._work: list[Future[Any]] = []

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def run(self, work: "Coroutine[Any, Any, Any]") -> None:
        """Start work that goes on until it ends or the loop does."""
        self._work.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, function: "Callable[..., object]", *arguments: object) -> None:
        """Call a function in the loop, soon."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def wait(self, work: "Coroutine[Any, Any, _T]", seconds: float, name: str) -> _T:
        """The result of work in the loop.

        Args:
            work: a coroutine.
            seconds: bound of the wait.
            name: of the other side, for the error.

        Raises:
            ExchangeError: if there is no result within that time.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except FutureTimeoutError:
            raise ExchangeError(f"{name} gave no answer within {seconds:g} s") from None
        finally:
            future.cancel()  # also where Ctrl-C ends the wait

    def stop(self) -> None:
        """Cancel all work and end the thread, bounded in time."""
        if not self._thread.is_alive():
            return
        for work in self._work:
            work.cancel()
        # What was cancelled gets a moment to end.
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.05, self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _serve(self) -> None:
        """Run the loop until `stop`, and close it."""
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        self._loop.close()
