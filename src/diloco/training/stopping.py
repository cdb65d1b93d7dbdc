"""The end of a run before its last step: one process hears a signal, and all save the same step.

A process that hears of a stop promises to begin no step after the one that it is in, and writes that step into the
store of all. The largest of these steps is the last: each process can still reach it, and none is beyond it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch.distributed as dist

from diloco.errors import ExchangeError, Stopped
from diloco.exchange.notices import ask, first_sentence
from diloco.exchange.transport import wait_for_all
from diloco.training.processes import AT_ONCE, SECONDS_BETWEEN_SIGNALS, STORE, on_signal, process_name
from diloco.training.world import World

if TYPE_CHECKING:
    from diloco.rendezvous.store_rendezvous import StoreRendezvous


@contextmanager
def stoppable() -> Iterator["Stop"]:
    """A context in which the signals that end a run raise `Stopped`, at once or at the end of a step."""
    stop = Stop()
    with on_signal(stop.hear):
        try:
            yield stop
        finally:
            stop.close()


class Stop:
    """The stop of a run, as one of its processes knows it."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._heard_at: float | None = None
        self._where, self._waits_for_step = "there is no step to save yet", False
        self._from = ""
        self._failure: str | None = None
        # The launcher passes on once what a terminal has sent to each process already, and ends all by AT_ONCE.
        self._repeats_count = STORE not in os.environ
        self._world: World | None = None
        self._store: dist.Store | None = None
        self._rank, self._ranks = 0, range(1)
        self._name_of: Callable[[int], str] = "replica {}".format
        self._lock = threading.Lock()
        self._begun = 0
        self._promise: int | None = None
        self._last_step: int | None = None
        self._is_closed = threading.Event()
        self._listener: threading.Thread | None = None
        self._watcher: threading.Thread | None = None

    def hear(self, number: int, _: object) -> None:
        """Note a signal, or raise `Stopped` where nothing is to be saved first."""
        now, is_first = time.monotonic(), self._heard_at is None
        is_at_once = number == AT_ONCE or self._failure is not None
        if not is_first and not is_at_once:
            assert self._heard_at is not None, "it is not the first"
            if not self._repeats_count or now - self._heard_at < SECONDS_BETWEEN_SIGNALS:
                return
        self._number, self._heard_at = self._number or number, self._heard_at or now
        if is_at_once or not is_first or not self._waits_for_step:
            raise self.stopped((self._waits_for_step and self._failure) or self._where)

    def stopped(self, saved: str) -> Stopped:
        """The exception with which the run ends; `saved` says how far it is saved."""
        assert self._number is not None, "there was a signal"
        return Stopped(f"stopped by {signal.Signals(self._number).name}{self._from}: {saved}", 128 + self._number)

    def save_first(self, world: World, step: int) -> None:
        """Let signals wait for the end of a step from now on, in which each process has taken this one."""
        self._world, self._begun = world, step
        self._where, self._waits_for_step = "this step is not saved", True
        if world.rendezvous is not None:
            watched = (world.rendezvous,)
            self._watcher = threading.Thread(target=self._watch, args=watched, name="stop waits", daemon=True)
            self._watcher.start()
        if world.store is None:
            return
        self._store = dist.PrefixStore("stop", world.store)
        self._rank, self._ranks = world.everyone.replica, range(world.everyone.num_replicas)
        self._name_of = partial(process_name, world.num_ranks)
        self._listener = threading.Thread(target=self._listen, args=(self._store,), name="stop", daemon=True)
        self._listener.start()

    def end_at_once(self, where: str) -> None:
        """Let signals end the run at once again; `where` says where it is."""
        self._where, self._waits_for_step = where, False

    def close(self) -> None:
        """End the threads: a signal from one of them, once its handler is gone, would kill this process."""
        self._is_closed.set()
        for thread in (self._listener, self._watcher):
            if thread is not None:
                thread.join(_SECONDS_TO_CLOSE)

    def is_before(self, step: int) -> bool:
        """True if the run stops before a step, which must not begin; waits for the others if there is a stop.

        Raises:
            Stopped: if another process does not answer.
        """
        if self._store is None:
            return self._number is not None
        with self._lock:
            if self._promise is None:
                self._begun = step
                return False
        deadline = time.monotonic() + _SECONDS_TO_ANSWER + _SECONDS_TO_CLOSE
        while self._last_step is None:
            if self._failure is not None or time.monotonic() > deadline:
                raise self.stopped(self._failure or _not_saved("the store of the processes does not answer"))
            time.sleep(0.01)
        return step > self._last_step

    def _listen(self, store: dist.Store) -> None:
        """Hear of a stop, answer with this process's step, and read the others', in a thread."""
        try:
            for look in count():
                if self._number is not None or (look % _LOOKS_PER_REQUEST == 0 and store.check([_STOP])):
                    break
                if self._is_closed.wait(_SECONDS_BETWEEN_LOOKS):
                    return
            if self._number is not None:
                store.compare_set(_STOP, "", f"{self._number} {self._rank}")
            number, rank = map(int, store.get(_STOP).split())
            if self._number is None:
                self._number = number
                self._from = f" at {self._name_of(rank)}" if self._repeats_count else ""
            with self._lock:
                self._promise = self._begun
            store.set(_step_of(self._rank), str(self._promise))
            self._last_step = self._largest_step(store)
        except (RuntimeError, ValueError) as error:
            self._fail(_not_saved(first_sentence(error)))

    def _watch(self, rendezvous: "StoreRendezvous") -> None:
        """End this process once it has heard of a stop and waits too long for other replicas, in a thread."""
        heard_at = None
        while not self._is_closed.wait(_SECONDS_BETWEEN_WATCHES):
            if self._number is None:
                continue
            heard_at, since = heard_at or time.monotonic(), rendezvous.waits_since
            if since is not None and time.monotonic() > max(heard_at, since) + _SECONDS_TO_ANSWER:
                self._fail(f"{self._where}: it waits for others, or for the store")
                return

    def _largest_step(self, store: dist.Store) -> int:
        """The largest of the steps that the processes have promised to end with."""
        waiting, deadline = [*self._ranks], time.monotonic() + _SECONDS_TO_ANSWER
        while waiting := [rank for rank in waiting if not store.check([_step_of(rank)])]:
            if time.monotonic() > deadline or self._is_closed.wait(_SECONDS_BETWEEN_LOOKS):
                raise RuntimeError(f"{self._names(waiting)} did not answer within {_SECONDS_TO_ANSWER:g} s")
        return max(int(store.get(_step_of(rank))) for rank in self._ranks)

    def _names(self, ranks: Collection[int]) -> str:
        return ", ".join(map(self._name_of, sorted(ranks)[:_MOST_NAMES]))

    def _fail(self, failure: str) -> None:
        """Tell the others, and raise `Stopped` in the main thread, which may wait for a process that is gone.

        Before a signal, do neither: the next one ends this process at once, since the others can't hear of it.
        """
        if self._is_closed.is_set():
            return
        self._failure = failure
        if self._number is None:
            return
        if self._world is not None:
            self._world.exchange.abort(failure)
        main = threading.main_thread().ident
        if signal.getsignal(signal.SIGTERM) == self.hear and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def wait_until_saved(self, step: int, *, seconds: float) -> None:
        """Wait until each process has saved the last step, as this one has.

        Args:
            step: the last one.
            seconds: how long the others may take.

        Raises:
            ExchangeError: if one fails, or is too late.
        """
        if self._store is None or self._world is None:
            return
        store, exchange = self._store, self._world.exchange
        begin, waiting = time.monotonic(), {*self._ranks}
        deadline = begin + seconds

        def missing() -> str:
            if exchange.failure is not None:
                raise ExchangeError(f"step {step} is not saved by every replica: {exchange.failure}")
            waiting.difference_update([r for r in waiting if ask(deadline + 1, store.check, [_saved_by(r)])])
            return self._names(waiting)

        ask(deadline, store.set, _saved_by(self._rank), "")
        where, remedy = f" at step {step}", "it is saved by the other replicas only"
        wait_for_all(missing, begin=begin, seconds=seconds, where=where, remedy=remedy)
        self._let_the_others_read(store)

    def _let_the_others_read(self, store: dist.Store) -> None:
        """Have the first process, which may hold the store, end last."""
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        with suppress(ExchangeError):
            ask(deadline, store.add, _NUM_ENDED, 1)
            while self._rank == 0 and ask(deadline, store.add, _NUM_ENDED, 0) < len(self._ranks):
                time.sleep(0.02)


_STOP, _NUM_ENDED = "signal", "ended"
_SECONDS_BETWEEN_LOOKS = 0.05
_LOOKS_PER_REQUEST = 5
_SECONDS_BETWEEN_WATCHES = 0.5
_SECONDS_TO_ANSWER = 25.0
"""Less than torchrun, schedulers, and providers of spot instances wait before they kill."""
_SECONDS_TO_CLOSE = 3.0
_MOST_NAMES = 8


def _not_saved(reason: str) -> str:
    return f"this step is not saved by every replica: {reason}"


def _step_of(rank: int) -> str:
    return f"step/{rank}"


def _saved_by(rank: int) -> str:
    return f"saved/{rank}"
