"""StoreRendezvous: replicas that come and go meet in a directory or a bucket; they join, take part and leave."""

import asyncio
import json
import logging
import math
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, Literal, TypeVar

from torch import Tensor

from diloco.errors import DilocoError, DisagreementError, ExchangeError, UserError
from diloco.exchange.transport import SECONDS_BETWEEN_LINES, SECONDS_OF_SILENCE, wait_for_all
from diloco.rendezvous.check import assert_sound
from diloco.rendezvous.contract import Decision, Form, Joined, News, NoDecisionError, Offer, StoredSnapshot
from diloco.rendezvous.deciding import Pace
from diloco.rendezvous.log.entries import FORMAT, MOST_SHARES, Create, Join, Leave, LogError, Rules
from diloco.rendezvous.log.index import newest_state
from diloco.rendezvous.log.keys import VARIABLE, Signer, signer_of_environment
from diloco.rendezvous.log.log import ENTRY, Log, begun, check_none_later, sealed_entry, source_of, stored_entry
from diloco.rendezvous.log.run import MOST_TOKENS, OuterRef, RunState
from diloco.rendezvous.log_thread import Background, LogThread
from diloco.rendezvous.objects import Objects
from diloco.rendezvous.store import Store
from diloco.schema import checked_name, json_facts, shown

_LOG = logging.getLogger("diloco")
_T = TypeVar("_T")
_NUM_SHARES = 16
_SECONDS_TO_WITHDRAW = 5.0


class StoreRendezvous:
    """A run in a store: a directory that all replicas see, or a bucket of S3, GCS or Azure.

    Each machine builds one with the same URL; the first creates the run, and the others join it, whenever they
    like. `step()` of an engine with it never waits, but with the quorum "all". Of a sharded replica every process
    builds one, and the first alone joins with it.

    Args:
        url: a path, file:///path, s3://bucket/prefix, gs://…, az://… or hf://buckets/…, with the ordinary
            environment variables for credentials and endpoint.
        name: this replica's; a later process of the same name takes the place of an earlier one. None is the
            host's name and random letters.
        quorum: "majority": a decision waits for all active replicas until t + τ, then for the majority until
            t + τ + patience; a number: then for so many, or for all active ones where they are fewer, without
            end; "all": each waits for all, as in a fixed group. None is the run's, or "majority".
        num_replicas: replicas that must be present together before the first inner step; None is the run's, or 1.
        patience: inner steps; None is H.
        weights: "tokens" or "tokens_squared_per_step"; None is the run's, or "tokens".
        max_stale: rounds after which a late payload is not counted any more; None is the run's, or 3.
        snapshot_rounds: rounds of a fragment between two snapshots of it; None is the run's, or 8.
        num_shares: shares into which `combine="reduce_scatter"` cuts a fragment, each averaged by one replica:
            about as many as there are replicas; None is the run's, or 16.
        num_slots: parts of the text, and so the most replicas that are active at once; None is the run's, or 64.
        bridge: the name of the process that moves Θ by what another run decides; None is the run's, or none.
        max_local_steps: inner steps without the store, after which this replica stops; None is 50 H.
        step_tokens: the most tokens that an inner step of this replica reads, which it declares to the others:
            they refuse an outer gradient that claims more. None declares no bound but one of 2^40 in all.
        key: the file of this replica's key; None is that of the environment variable DILOCO_KEY, or no key.
        memory_bytes: size of the others' payloads that are kept in memory until they are counted: what exceeds it
            is downloaded again. Their decoded values take as much at the most: what exceeds it is decoded again.
        poll_seconds: time between two looks into the store; None is 0.02 for a directory, and 0.5 for others.
        timeout_seconds: how long joining, leaving, and with the quorum "all" a decision, may take.
        facts: further settings that all replicas of the run must share, JSON by name, such as the learning rate.

    Raises:
        UserError: for a wrong URL, name or setting.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        quorum: Literal["majority", "all"] | int | None = None,
        num_replicas: int | None = None,
        patience: int | None = None,
        weights: Literal["tokens", "tokens_squared_per_step"] | None = None,
        max_stale: int | None = None,
        snapshot_rounds: int | None = None,
        num_shares: int | None = None,
        num_slots: int | None = None,
        bridge: str | None = None,
        max_local_steps: int | None = None,
        step_tokens: int | None = None,
        key: str | None = None,
        memory_bytes: int = 1 << 30,
        poll_seconds: float | None = None,
        timeout_seconds: float = 600.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        if num_shares is not None and not 2 <= num_shares <= MOST_SHARES:
            raise UserError(f"num_shares={num_shares} must be from 2 to {MOST_SHARES}", "num_shares")
        if step_tokens is not None and not 1 <= step_tokens <= MOST_TOKENS:
            raise UserError(f"step_tokens={step_tokens} must be from 1 to {MOST_TOKENS}", "step_tokens")
        self.name = _name(name)
        self._asked_local_steps, self._step_tokens = max_local_steps, step_tokens
        self._url, self._patience, self._timeout_seconds = str(url), patience, timeout_seconds
        self._signer: Signer = signer_of_environment() if key is None else Signer.of_file(key)
        self._store = Store.open(self._url)
        self._facts, self._memory_bytes = json_facts(facts or {}), memory_bytes
        self._poll_seconds = poll_seconds or (0.02 if self._store.is_directory else 0.5)
        asked = {"quorum": quorum, "num_replicas": num_replicas, "weights": weights, "max_stale": max_stale}
        asked |= {"snapshot_rounds": snapshot_rounds, "num_shares": num_shares, "num_slots": num_slots}
        asked |= {"bridge": None if bridge is None else checked_name(bridge)}
        self._asked = {rule: value for rule, value in asked.items() if value is not None}
        self._background = Background("diloco rendezvous")
        self._has_joined = False
        self._seat: _StoreSeat | None = None

    @property
    def replica(self) -> int:
        """This replica's number in the run."""
        return self._seated.own

    @property
    def slot(self) -> int:
        """The number of this replica's place in the text, for `diloco.SlotSampler`: no shard of it."""
        return self.state.members[self.replica].slot

    @property
    def start(self) -> int:
        """The place in its slot, in tokens, at which this replica starts: earlier holders have read up to it."""
        return self.state.members[self.replica].start

    @property
    def state(self) -> RunState:
        """The state that the log makes, as far as this replica has read it."""
        return self._seated.log_thread.state

    @property
    def store(self) -> Store:
        """The store, with its counts of requests and bytes."""
        return self._store

    @property
    def counted(self) -> tuple[int, int]:
        """The tokens, P times those of the run, and the number of the outer steps that this replica has taken.

        Shifts are left out.
        """
        state, not_taken = self._seated.log_thread.not_taken()
        waiting = [ref.body for ref in not_taken if not state.is_shift(ref.body)]
        tokens = sum(contribution.tokens for body in waiting for contribution in body.contributions)
        return state.tokens - tokens, state.num_outer - len(waiting)

    @property
    def entry(self) -> int:
        """Number of the log's newest entry up to which this replica has taken every outer step."""
        return self._seated.entry

    @property
    def is_closed(self) -> bool:
        """True if the newest entry closes the run, and this replica has taken every outer step."""
        return bool(self.state.closed) and self.entry == self.state.number - 1

    @property
    def waits_since(self) -> float | None:
        """Time, by `time.monotonic`, since which the training thread waits for decisions; None if it does not."""
        return None if self._seat is None else self._seat.waits_since

    @property
    def timeout_seconds(self) -> float:
        """Longest time that joining, leaving, or a decision that is waited for, may take."""
        return self._timeout_seconds

    @property
    def _seated(self) -> "_StoreSeat":
        if self._seat is None:
            raise UserError(
                "this process has not joined the run: build the engine first; of a sharded replica the first "
                "process alone joins: let it tell the others what they need to know",
                "rendezvous",
            )
        return self._seat

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        """Join the run, or create it.

        Raises:
            DisagreementError: if the run has other settings.
            UserError: if this object has joined already, the run refuses this replica, or shares are asked for and
                the fragments are not cut.
            ExchangeError: if too few replicas join in time.
        """
        if self._has_joined:
            raise UserError("this StoreRendezvous has joined already: build one for each engine", "rendezvous")
        self._has_joined = True
        most = self._asked_local_steps or 50 * sync_every
        # An outer gradient may be lost before an outage and after it.
        most_steps = min(2 * max(most, 50 * sync_every), MOST_TOKENS // (self._step_tokens or 1))
        wish = Wish(
            name=self.name,
            step_tokens=self._step_tokens or MOST_TOKENS // most_steps,
            most_steps=most_steps,
            rules=_rules(self._asked, form),
            asked=frozenset(self._asked),
            facts={**self._facts, **facts},
            timeout_seconds=self._timeout_seconds,
        )
        background, store, seconds = self._background, self._store, self._timeout_seconds
        background.start()
        try:
            log, own = self._wait(join(store, self._signer, wish))
            with _withdrawing(background, log, own):
                self._wait_for_companions(log, own)
                form = form.cut(log.state.rules.num_shares)
                objects = Objects(store=store, form=form, run=log.state.run, patience_seconds=seconds)
                snapshots = self._wait(newest_snapshots(objects, log, own))
        except BaseException:
            background.stop()
            raise
        log_thread = LogThread(store, log, own, form, self._signer, self._pace(sync_every))
        self._seat = _StoreSeat(store, background, log_thread, own, timeout_seconds=seconds, max_local_steps=most)
        replay = outer_entries_to_replay(log.state)
        background.run(log_thread.run(replay))
        return Joined(
            seat=self._seat,
            run=log.state.run,
            rules=log.state.rules,
            replica=own,
            slot=self.slot,
            start=self.start,
            step_tokens=wish.step_tokens,
            most_steps=wish.most_steps,
            slot_rounds=[fragment.last_round.get(self.slot, 0) for fragment in log.state.fragments],
            snapshots=snapshots,
            form=form,
            num_decisions=len(replay),
        )

    def _wait_for_companions(self, log: Log, own: int) -> None:
        """Wait until no replica is missing without which this one takes no inner step.

        Raises:
            ExchangeError: naming how many are missing, if too few join in time; then this replica has left.
        """
        try:
            wait_for_all(
                lambda: self._wait(missing(log, own)),
                begin=time.monotonic(),
                seconds=self._timeout_seconds,
                where=f" at {self._url}",
                remedy="start the others, each with a name of its own",
            )
        except ExchangeError:
            with suppress(DilocoError):
                farewell = withdraw(log, own, only_if_missing=True)
                if not self._background.wait(farewell, _SECONDS_TO_WITHDRAW, "the store"):
                    return
            raise

    def _pace(self, sync_every: int) -> Pace:
        return Pace(
            poll_seconds=self._poll_seconds,
            memory_bytes=self._memory_bytes,
            patience=sync_every if self._patience is None else self._patience,
            drain_seconds=max(2.0, 10 * self._poll_seconds),
            close_seconds=max(10.0, 30 * self._poll_seconds),
        )

    def leave(self, *, seconds: float | None = None) -> None:
        """Wait for own uploads and leave; what was uploaded may be counted until the run is closed.

        After `engine.finish()` a warning names the entry of the log whose outer parameters this replica has,
        unless that is the one that closes the run.

        Args:
            seconds: how long this may take; None is twice `timeout_seconds`.

        Raises:
            ExchangeError: if it takes longer, or an own payload can't be uploaded.
        """
        if self._seat is not None:
            self._seat.leave(seconds=seconds)

    def abort(self, reason: str) -> None:
        """Stop at once, after an error; the other replicas go on."""
        if self._seat is not None:
            self._seat.abort(reason)
        self._background.stop()

    def _wait(self, work: "Coroutine[Any, Any, _T]") -> _T:
        """The result of work in the loop, bounded in time."""
        return self._background.wait(work, 2 * self._timeout_seconds, self._url)


class _StoreSeat:
    """The place of one replica in the run of a store, as its engine uses it.

    Args:
        store: the run's.
        background: the loop in which the log thread runs.
        log_thread: this replica's.
        own: its number.
        timeout_seconds: how long a decision that is waited for, or half of leaving, may take.
        max_local_steps: inner steps without the store, after which this replica stops.
    """

    def __init__(
        self,
        store: Store,
        background: Background,
        log_thread: LogThread,
        own: int,
        *,
        timeout_seconds: float,
        max_local_steps: int,
    ) -> None:
        self.log_thread, self.own = log_thread, own
        self._store, self._background = store, background
        self._timeout_seconds, self._max_local_steps = timeout_seconds, max_local_steps
        self._aborted: str | None = None
        self._outage_since: float | None = None
        self._step_of_outage = 0
        """The first step at which it was seen."""
        self._last_step: tuple[float, int] | None = None  # time and inner steps when these changed last
        self._durations = deque[float](maxlen=64)  # of the last inner steps
        self._has_drained = self._is_closing = False
        self.waits_since: float | None = None
        """Time since which the training thread waits for decisions; None while it does not."""
        self._logged_at: dict[bool, float] = {}
        """Time at which a wait was logged last: of those for the run's end, and of those for a fragment."""

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self._aborted or self.log_thread.failure

    def offer(self, offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
        """Start to upload an outer gradient, and return at once."""
        self.log_thread.overlap_seconds = offer.overlap * self._step_seconds
        self._background.call(self.log_thread.outbox.put, offer, payloads, values_N)

    def step(
        self,
        num_steps: int,
        taken_rounds: Sequence[tuple[int, int]],
        *,
        room: int,
        wait_for: int | None = None,
        is_last: bool = False,
    ) -> News:
        """Tell where this replica is, and take the news; see `Seat`."""
        log_thread = self.log_thread
        self._take_time(num_steps)
        self._has_drained = self._has_drained or is_last
        log_thread.step, log_thread.taken_rounds = num_steps, tuple(taken_rounds)
        log_thread.draining_since = (log_thread.draining_since or time.monotonic()) if is_last else None
        self._check_contact(num_steps)
        decisions, closed = [], log_thread.closed  # read before the decisions, of which none must be left out then
        if wait_for is not None:
            decisions = self._waited_for(wait_for)
        elif room > 0:
            decisions = log_thread.new_decisions()
        else:
            closed = ()
        state = log_thread.state
        return News(
            decisions=decisions,
            wanted=log_thread.wanted,
            rounds=[log.round for log in state.fragments],
            is_finished=state.finished,
            closed=closed,
        )

    def _check_contact(self, step: int) -> None:
        """Stop after too many inner steps without the store."""
        outage = self._store.outage
        if outage is None or outage.since != self._outage_since:
            self._outage_since, self._step_of_outage = None if outage is None else outage.since, step
        elif (num_steps := step - self._step_of_outage) > self._max_local_steps:
            self._aborted = (
                f"{outage.trouble}, for {outage.seconds:.0f} s and {num_steps} inner steps, more than "
                f"max_local_steps={self._max_local_steps}: check the network and the store, and start this "
                "replica again from its checkpoint"
            )

    def _waited_for(self, fragment: int) -> list[Decision]:
        """The decisions that have come once one of a fragment has, or with −1 any; or once the run is closed.

        Raises:
            NoDecisionError: if none came in time.
            ExchangeError: if this replica can't go on.
        """
        log_thread, decisions = self.log_thread, list[Decision]()
        log_thread.overlap_seconds = 0.0  # look often: the training thread waits

        def is_here() -> bool:
            """Take the decisions that have come, since only a few may wait; true once the awaited one is here."""
            decisions.extend(log_thread.new_decisions())
            fragments = {decision.fragment for decision in decisions}
            return bool(fragments if fragment == -1 else fragment in fragments)

        def is_over() -> bool:
            """True once nothing more is to be waited for."""
            return is_here() or bool(log_thread.closed) or self.failure is not None

        with log_thread.news:
            self.waits_since = time.monotonic()
            try:
                is_in_time = self._is_over_in_time(is_over, fragment)
            finally:
                self.waits_since = None
            if not is_in_time:
                about = "" if fragment == -1 else f" about fragment {fragment}"
                raise NoDecisionError(
                    f"no decision{about} came within {self._timeout_seconds:g} s: see with diloco store status "
                    f"{self._store.url} which replica is missing"
                )
            if self.failure is not None and not is_here():
                raise ExchangeError(self.failure)
        return decisions

    def _is_over_in_time(self, is_over: Callable[[], bool], fragment: int) -> bool:
        """Wait for news, bounded in time, and log after a while what is waited for, at most once per minute."""
        news, deadline = self.log_thread.news, time.monotonic() + self._timeout_seconds
        if news.wait_for(is_over, min(SECONDS_OF_SILENCE, self._timeout_seconds)):
            return True
        now, is_of_the_end = time.monotonic(), fragment < 0
        if now > self._logged_at.get(is_of_the_end, -math.inf) + SECONDS_BETWEEN_LINES:
            self._logged_at[is_of_the_end] = now
            awaited, until = self.log_thread.awaited(fragment)
            most = min(deadline, until if until > now else deadline) - now
            _LOG.warning("waiting for %s, up to %.0f s more …", awaited, most)
        return news.wait_for(is_over, deadline - now)

    def refusal(self, offer: Offer) -> str:
        """The reason why no outer step counts an own offer any more."""
        return self.log_thread.refusal(offer)

    def snapshot(self, fragment: int, round: int, vectors: Mapping[str, Tensor]) -> None:
        """Start to upload Θ_p (`outer`) and the slots after a round."""
        self._background.call(self.log_thread.snapshots.put, fragment, round, vectors)

    def close(self, *, are_offers_counted: bool = True, if_last: bool = False) -> None:
        """Start to end the run, unless another replica does, too; see `Seat`."""
        self.log_thread.are_offers_counted = are_offers_counted
        if self._is_closing or self.log_thread.state.closed:
            return
        self._is_closing = True
        if if_last:
            self._background.run(self.log_thread.close_if_last())
        else:
            self._background.run(self.log_thread.close(self._step_seconds, self._timeout_seconds))

    def _take_time(self, num_steps: int) -> None:
        now, (then, last_step) = time.monotonic(), self._last_step or (0.0, num_steps)
        if num_steps > last_step:
            self._durations.append((now - then) / (num_steps - last_step))
        if num_steps != last_step or self._last_step is None:
            self._last_step = now, num_steps

    @property
    def _step_seconds(self) -> float:
        """The median time of the last inner steps: pauses, and steps that a loaded state counts, are no pace."""
        return median(self._durations or [0.0])

    def leave(self, *, seconds: float | None = None) -> None:
        """Wait for own uploads and leave; see `StoreRendezvous.leave`."""
        if self._aborted is not None:
            return
        try:
            if self.failure is None and not self._is_closing:
                seconds = 2 * self._timeout_seconds if seconds is None else seconds
                self._background.wait(self.log_thread.leave(finished=False), seconds, self._store.url)
            elif self.failure is None:
                # An error may have ended the wait for the last decisions.
                most = _SECONDS_TO_WITHDRAW if self.log_thread.are_offers_counted else 2 * self._timeout_seconds
                self.log_thread.are_offers_counted = True
                self._wait_until_left(most if seconds is None else seconds)
            if self._has_drained and not self.log_thread.closed:
                self._say_entry()
        finally:
            self._aborted = "this replica has left the run"
            self._background.stop()

    @property
    def entry(self) -> int:
        """Number of the log's newest entry up to which this replica has taken every outer step."""
        state, not_taken = self.log_thread.not_taken()
        return min((ref.number for ref in not_taken), default=state.number) - 1

    def _say_entry(self) -> None:
        """Name the entry whose outer parameters a replica ends with: the run may go on."""
        _LOG.warning(
            "%s ends with the outer parameters after entry %d of the log of %s, and no entry closes the run: "
            "others may go on",
            *(self.log_thread.state.members[self.own].name, self.entry, self._store.url),
        )

    def _wait_until_left(self, seconds: float) -> None:
        """Wait until the log says that this replica has left, it can't say so any more, or the time is over."""
        deadline, thread = time.monotonic() + seconds, self.log_thread
        while not (thread.state.members[self.own].left or thread.has_ended) and time.monotonic() < deadline:
            time.sleep(0.02)

    def abort(self, reason: str) -> None:
        """Stop at once, after an error; the other replicas go on."""
        with self.log_thread.news:  # a thread may wait there
            self._aborted = self._aborted or reason
            self.log_thread.news.notify_all()
        self._background.stop()


@contextmanager
def _withdrawing(background: Background, log: Log, own: int) -> Iterator[None]:
    """Leave the run after an error, so that nobody counts on a replica that never trained."""
    try:
        yield
    except BaseException:
        with suppress(DilocoError):
            background.wait(withdraw(log, own), _SECONDS_TO_WITHDRAW, "the store")
        raise


def _rules(asked: Mapping[str, Any], form: Form) -> Rules:
    """The rules of a run that this replica creates."""
    if form.second is None and "num_shares" in asked:
        raise UserError(
            f"num_shares={asked['num_shares']} means nothing with combine=gather: leave it out, or take "
            "combine=reduce_scatter",
            *("num_shares", "combine"),
        )
    default: dict[str, Any] = {} if form.second is None else {"num_shares": _NUM_SHARES}
    return Rules(num_fragments=len(form.sizes), **(default | dict(asked)))


def _name(name: str | None) -> str:
    if name is None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip(".-")[:40] or "replica"
        return f"{host}-{secrets.token_hex(3)}"
    return checked_name(name)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The run that a replica wants to join."""

    name: str
    step_tokens: int
    """The most tokens that one of its inner steps reads."""
    most_steps: int
    """The most inner steps between two of its sends of a fragment that are counted."""
    rules: Rules
    """The rules of the run that it creates if there is none."""
    asked: frozenset[str]
    """The rules that its user has set, which an existing run must have, too."""
    facts: Mapping[str, Any]
    """The settings that all replicas share."""
    timeout_seconds: float


async def join(store: Store, signer: Signer, wish: Wish) -> tuple[Log, int]:
    """Join the run of a store, or create it and join.

    Returns:
        The log up to the join, and the replica's number.

    Raises:
        DisagreementError: if the run has other settings.
        UserError: if the name is the bridge's.
        LogError: if the run refuses the replica, or its log is damaged or has a hole.
        StoreError: if the store can't be used.
    """
    patience = wish.timeout_seconds
    data = await stored_entry(store, 0, patience_seconds=patience) or await _created(store, signer, wish)
    create, first = begun(data)
    log = Log(store, await newest_state(store, first), signer, patience_seconds=patience)
    _compare(create, wish)
    if wish.name == create.rules.bridge and "bridge" not in wish.asked:
        raise UserError(f"name={wish.name} is the name of the run's bridge: take another", "name")
    await log.read_all(at_once=1)
    await log.check_no_gap()  # which a join would fill
    return log, await _number_of_joined(log, signer, wish, store.url)


async def missing(log: Log, own: int) -> str:
    """The replicas without which no inner step is taken, in words; empty if none is missing.

    Raises:
        LogError: if the log is damaged.
        FencedError: if another process takes the replica's place.
        StoreError: if the store can't be used.
    """
    await _read_on(log, own)
    num_missing = log.state.num_missing
    return f"{num_missing} of {log.state.rules.num_replicas} replicas" if num_missing else ""


async def newest_snapshots(objects: Objects, log: Log, own: int) -> dict[int, StoredSnapshot]:
    """The newest snapshot of each fragment that has one, from which a joiner starts.

    Raises:
        LogError: if the log or a snapshot is damaged.
        FencedError: if another process takes the replica's place meanwhile.
        StoreError: if the store can't be used.
    """
    for num_tries in range(1, _MOST_TRIES + 1):
        refs = {p: of_p.snapshots[-1] for p, of_p in enumerate(log.state.fragments) if of_p.snapshots}
        try:
            snapshots = await asyncio.gather(*(objects.snapshot(p, ref) for p, ref in refs.items()))
            return dict(zip(refs, snapshots, strict=True))
        except LogError:  # newer ones may have taken their place meanwhile
            if num_tries == _MOST_TRIES:
                raise
        await _read_on(log, own)
    raise AssertionError("the last try returns or raises")


async def _read_on(log: Log, own: int) -> None:
    """Read what was written since, while this replica is still in the run."""
    async for _, entry in log.read(at_once=1):
        log.state.check_goes_on(own, entry)


async def withdraw(log: Log, own: int, *, only_if_missing: bool = False) -> bool:
    """Leave again, before a first step; True if this replica has left, or another has its place.

    Args:
        log: of the run.
        own: this replica.
        only_if_missing: stay where nobody is missing any more: a companion whose join stands in the log before
            this replica's farewell counts on it.
    """
    while not (log.state.members[own].left or log.state.members[own].fenced):
        if only_if_missing and not log.state.num_missing:
            return False
        _, is_own = await log.append(Leave(finished=False), author=own)
        if not is_own:
            await log.read_all(at_once=1)
    return True


async def _created(store: Store, signer: Signer, wish: Wish) -> bytes:
    """Entry 0, from this replica or from another that was faster."""
    await check_none_later(store, 0, patience_seconds=wish.timeout_seconds)
    await assert_sound(store)
    allowed = (signer.public,) if signer.public else ()
    body = Create(format=FORMAT, rules=wish.rules, facts=dict(wish.facts), creator=signer.public, allowed=allowed)
    data = sealed_entry(body, signer, author=-1, previous="")
    ENTRY.open(data, source_of(0))  # refuse here what everybody would have to refuse
    other = await store.create(ENTRY.name(0), data, patience_seconds=wish.timeout_seconds)
    if other is None and not signer.public:
        _LOG.warning(
            "this run trusts everybody who can write to %s: to choose who may join, create it with a key (see "
            "diloco keys)",
            store.url,
        )
    return data if other is None else other


def _compare(body: Create, wish: Wish) -> None:
    """Refuse a run with other settings.

    Raises:
        DisagreementError: naming the first that differs, and both values.
    """
    mine = json.loads(json.dumps(dict(wish.facts)))
    for name in dict.fromkeys((*mine, *body.facts)):
        if name not in mine or name not in body.facts or mine[name] != body.facts[name]:
            raise DisagreementError(
                f"this replica differs from the run in {name}: the run has {shown(body.facts.get(name))}, and "
                f"this replica {shown(mine.get(name))}; start it with the run's settings, or in another place",
                name,
            )
    for field in fields(Rules):
        theirs, ours = getattr(body.rules, field.name), getattr(wish.rules, field.name)
        if field.name in wish.asked and theirs != ours:
            raise DisagreementError(
                f"{field.name}={ours}, and the run was created with {field.name}={theirs}: leave it out",
                field.name,
            )


async def _number_of_joined(log: Log, signer: Signer, wish: Wish, url: str) -> int:
    """The number under which this replica has joined."""
    while True:
        amounts = {"step_tokens": wish.step_tokens, "most_steps": wish.most_steps}
        body, own = Join(name=wish.name, key=signer.public, **amounts), len(log.state.members)
        if reason := log.state.refusal_of_joiner(body):
            raise LogError(_refusal(log.state, signer, url) or f"the run refuses this replica: it {reason}")
        _, is_own = await log.append(body, author=own)
        if is_own:
            return own
        await log.read_all(at_once=1)


def _refusal(state: RunState, signer: Signer, url: str) -> str:
    """The sentence for a refusal that the user can mend; empty for others."""
    if state.closed:
        return (
            f"the run refuses this replica: it joins a run that has ended: diloco export {url} writes its outer "
            "parameters; to train on, create another in another place"
        )
    if state.creator and not signer.public:
        return f"the run asks for a key: set {VARIABLE} to this replica's key file, which diloco keys new makes"
    if state.creator and signer.public not in state.allowed:
        return (
            "the key of this replica is not among those that may join the run: its creator allows it by "
            f"diloco keys allow {url} {signer.public}"
        )
    if signer.public and not state.creator:
        return f"the run was created without keys, and this replica has one: leave {VARIABLE} unset"
    return ""


_MOST_TRIES = 10


def outer_entries_to_replay(state: RunState) -> tuple[OuterRef, ...]:
    """The outer entries after each fragment's newest snapshot, in the log's order."""
    return tuple(ref for ref in state.since if not state.has_snapshot(ref.body.fragment, ref.body.round))
