"""Notices of the replicas beside their payloads: that one has failed, or at which step one finishes.

They lie in the store of the process group. While something is in flight, each process looks there twice a second,
and ends the waits for what will never come. A thread looks: a wait of gloo can be ended, but not polled.
"""

import atexit
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import Event, Thread, current_thread
from typing import ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from diloco.errors import ExchangeError, printable
from diloco.exchange.transport import SAME_NUMBER_OF_STEPS, Store, Tag

P = ParamSpec("P")
T = TypeVar("T")


def within(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call. If the time is over first, the call goes on in a thread that nobody waits for.

    Raises:
        TimeoutError: if the time is over.
    """
    return in_thread(call, *args, **kwargs).result(max(seconds, _SHORTEST_SECONDS))


def in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Start a call in a thread of its own; its result, which another thread may set before it returns."""
    result: Future[T] = Future()
    calls = [partial(call, *args, **kwargs)]  # what it holds, such as a listener, is free once it returns

    def run() -> None:
        with suppress(InvalidStateError):
            try:
                value = calls.pop()()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)

    Thread(target=run, name="bounded call", daemon=True).start()
    return result


def ask(deadline: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The answer of a store, which replica 0 holds. Each call costs a thread: not for a training step.

    Args:
        deadline: for the answer, by `time.monotonic`.
        call: a method of the store.
        args: its arguments.
        kwargs: its arguments.

    Raises:
        ExchangeError: if replica 0 is gone, or does not answer by the deadline.
    """
    try:
        return within(deadline - time.monotonic(), call, *args, **kwargs)
    except ExchangeError:
        raise
    except TimeoutError:
        raise ExchangeError("replica 0 does not answer: its process or its machine stands still", (0,)) from None
    except RuntimeError as error:
        message = f"the connection to replica 0 broke off: {first_sentence(error)}"
        raise ExchangeError(message, (0,)) from None


def first_sentence(error: Exception) -> str:
    """The first sentence of a transport's message, without the place in its source."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (first.split("] ", 1)[-1] if first.startswith("[") else first).split(". ")[0]


_SHORTEST_SECONDS = 0.1


class Wait(Protocol):
    """A wait for an exchange that may never take place."""

    tag: Tag

    def interrupt(self, reason: str) -> None:
        """End the wait."""
        ...

    def check_connection(self) -> None:
        """End the wait if its connection has closed."""
        ...


class Notices:
    """The notices of one exchange.

    Args:
        store: shared by all processes of the exchange, and used for nothing else.
        replica: this process's.
        num_replicas: M.
        num_processes: of all replicas, that read these notices.
        on_close: called at the end; it may close the store.
    """

    def __init__(
        self,
        store: Store,
        replica: int,
        num_replicas: int,
        num_processes: int,
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.failure: str | None = None
        """The other replica that has failed, and its reason; None as far as is known."""
        self._store: Store = store
        self._on_close = on_close
        self._replica, self._num_replicas, self._num_processes = replica, num_replicas, num_processes
        self._waiting: list[Wait] = []
        self._num_finishes = 0
        self._in_flight = False
        self._ended = Event()
        self._thread: Thread | None = None

    def abort(self, reason: str) -> None:
        """Post that this replica has failed, and wait until the others have read it, 3 s at the most."""
        self._in_flight = False
        if self.failure is not None or self._num_processes == 1:
            return
        mine = f"replica {self._replica} failed: {reason}"[:_LONGEST_FAILURE]
        deadline = time.monotonic() + _SECONDS_TO_BE_READ
        store = self._store
        try:
            first = ask(deadline, store.compare_set, "failure", "", mine)
            self.failure = _readable(first)
            if first != mine.encode():  # another came first
                ask(deadline, store.add, "readers", 1)
                return
            others = self._num_processes - 1
            while ask(deadline, store.add, "readers", 0) < others and time.monotonic() < deadline:
                time.sleep(0.05)
        except RuntimeError:
            return  # the process that holds the store is gone or stands still: the others notice that themselves

    @contextmanager
    def finishing(self, step: int) -> Iterator[None]:
        """Post that this replica sends nothing after a step, until all replicas have reached that step."""
        if self._num_processes > 1:
            deadline = time.monotonic() + _SECONDS_TO_BE_READ
            with suppress(RuntimeError):  # a store that is gone took a replica with it, whom the next wait names
                # The count tells this finish from earlier ones, whose notices stay.
                ask(deadline, self._store.set, f"finishing/{self._replica}", f"{self._num_finishes} {step}")
        yield
        self._num_finishes += 1
        self._in_flight = False

    @contextmanager
    def watching(self, wait: Wait) -> Iterator[None]:
        """Interrupt a wait with the reason when a notice says that it is in vain."""
        self._waiting.append(wait)
        try:
            yield
        finally:
            self._waiting.remove(wait)

    def expect(self) -> None:
        """Start to look for notices: something is in flight."""
        self._in_flight = True
        if self._thread is None and self._num_processes > 1:
            self._thread = Thread(
                target=_look_again_and_again, args=(weakref.ref(self), self._ended), name="notices", daemon=True
            )
            self._thread.start()
            _ALIVE.add(self)

    def look(self) -> bool:
        """Read the notices, and interrupt every wait that is in vain; False if their store is gone."""
        try:
            if self.failure is None and self._store.check(["failure"]):
                self.failure = _readable(self._store.get("failure"))
                self._store.add("readers", 1)
            for wait in list(self._waiting):
                if (reason := self.failure or self._never_comes(wait.tag)) is not None:
                    wait.interrupt(reason)
        except RuntimeError:
            self._in_flight = False  # the store is gone: so are the connections to the process that held it
            return False
        return True

    def _never_comes(self, tag: Tag) -> str | None:
        """The reason why an exchange will not take place."""
        if not tag.step:
            return None
        for replica in range(self._num_replicas):
            key = f"finishing/{replica}"
            if replica == self._replica or not self._store.check([key]):
                continue
            try:
                finish, last_step = map(int, self._store.get(key).split())
            except ValueError:
                return f"replica {replica} posted a notice that this version can't read"
            if finish == self._num_finishes and last_step < tag.step:
                return (
                    f"replica {replica} called finish() after step {last_step}, and this replica waits for "
                    f"what is sent after step {tag.step}: {SAME_NUMBER_OF_STEPS}"
                )
        return None

    def look_if_in_flight(self) -> None:
        """Read the notices where something can be in vain, and check the connections of the waits."""
        if self._in_flight:
            self.look()
        for wait in list(self._waiting):
            wait.check_connection()

    def close(self) -> None:
        """End the thread that looks, and every wait, and let go of the store."""
        self._ended.set()
        for wait in list(self._waiting):
            wait.interrupt("this process ends")
        deadline = time.monotonic() + _SECONDS_TO_BE_READ
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(_SECONDS_TO_BE_READ)
        self._store, self._in_flight = dist.HashStore(), False
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class WithNotices:
    """The part of a transport by which a failure reaches the others."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices

    @property
    def failure(self) -> str | None:
        """The other replica that has failed, and its reason; None as far as is known."""
        return self._notices.failure

    def abort(self, reason: str) -> None:
        """Tell the others that this replica has failed; waits until they know, 3 s at the most."""
        self._notices.abort(reason)

    def finishing(self, step: int) -> AbstractContextManager[None]:
        """Tell the others that this replica sends nothing after a step."""
        return self._notices.finishing(step)


_LONGEST_FAILURE = 4000
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_BE_READ = 3.0


def _readable(failure: bytes) -> str:
    """A replica's message, without characters that a terminal would obey."""
    return printable(failure[:_LONGEST_FAILURE].decode(errors="replace"))


def _look_again_and_again(notices: "weakref.ref[Notices]", ended: Event) -> None:
    while not ended.wait(_SECONDS_BETWEEN_LOOKS):
        if (alive := notices()) is None:
            return
        alive.look_if_in_flight()
        del alive  # or it would live as long as this thread


_ALIVE: "weakref.WeakSet[Notices]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that came back from torch while Python shuts down would end the process with SIGABRT."""
    for notices in list(_ALIVE):
        notices.close()
