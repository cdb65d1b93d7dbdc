"""A fixed group of replicas, which a transport joins: they take the same steps, and all are in every round.

Shapes: N elements of one fragment that this process holds.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco.engine import checkpoint
from diloco.engine.checkpoint import loadable, refuse_together
from diloco.engine.guards import refuse_equal_payloads
from diloco.engine.lanes import Handle, HereLane, Lane, QueueLane, Started, ThreadLane, device_lane
from diloco.engine.outer_state import ERROR, OUTER
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica import Encoded, ReplicaRounds, outer_state, outer_step
from diloco.engine.settings import Settings
from diloco.engine.shards import sum_over_shards
from diloco.errors import DisagreementError, ExchangeError, PayloadError, UserError
from diloco.exchange.process_group import Answers
from diloco.exchange.transport import Channel, Tag, Transport, agree, failing_together
from diloco.outer.averages import Average, Reduction
from diloco.outer.cohort import Cohort
from diloco.outer.digest import parameters_hash
from diloco.outer.step import OuterStep
from diloco.schedule import Due, Sync
from diloco.wire.payload import Key


def exchange(
    transport: Transport,
    lane: Lane,
    reduction: Reduction,
    payloads: Sequence[Tensor],
    num_elements: int,
    key: Key,
    cohort: Cohort,
    tag: Tag,
) -> Handle[dict[int, Tensor]]:
    """Start the first phase; a second phase follows in a thread as soon as the first is over."""
    check = partial(refuse_equal_payloads, reduction=reduction, num_elements=num_elements, key=key, cohort=cohort)
    first = _Phase(transport, reduction.addressed(payloads, cohort), tag, check if tag.round == 1 else None)
    if reduction.num_phases == 1:
        return first

    def relay() -> dict[int, Tensor]:
        average = reduction.relay(first.wait(), num_elements, key, cohort)
        return _Phase(transport, dict.fromkeys(cohort.members, average), tag._replace(phase=1)).wait()

    return lane.run(relay)


class _Phase:
    """One phase of an exchange, with this replica's own payload beside the others'."""

    def __init__(
        self,
        transport: Transport,
        payloads: Mapping[int, Tensor],
        tag: Tag,
        check: Callable[[Mapping[int, Tensor]], None] | None = None,
    ) -> None:
        others = {member: payload for member, payload in payloads.items() if member != transport.replica}
        self._own = {transport.replica: payloads[transport.replica]}
        self._pending = transport.start(others, tag)
        self._check = check

    def wait(self) -> dict[int, Tensor]:
        received = {**self._pending.wait(), **self._own}
        if self._check is not None:
            self._check(received)
        return received


class Sent(NamedTuple):
    """Payloads that this replica has sent."""

    payloads: tuple[Tensor, ...]
    exchanged: Handle[dict[int, Tensor]]
    """The last phase's payload of every member, this replica's own included."""


@dataclass(eq=False)
class Round:
    """One round of one fragment, from its send until no replica needs its payloads any more."""

    sync: Sync
    reduction: Reduction
    sent: Started[Sent]
    """The send, which waits for a GPU until it has encoded the outer gradient."""
    cohort: Cohort
    """The replicas whose outer gradients are averaged."""
    received: bool = False
    started: float = field(default_factory=time.perf_counter)


@dataclass(eq=False, kw_only=True)
class Rounds(ReplicaRounds):
    """The rounds in flight between the replicas of a transport, and what they change."""

    transport: Transport
    cohort: Cohort
    """The replicas of the rounds that begin now."""
    relays: Lane = field(default_factory=ThreadLane)
    """The lane on which a reduction's second phase follows the first."""
    sends: Lane = field(default_factory=HereLane)
    """The lane on which a GPU is waited for before something is sent."""
    in_flight: list[Round] = field(default_factory=list)
    """The rounds in flight, in the order in which they were sent."""
    drained_step: int = 0
    """The last step at which `finish` merged everything that was sent."""

    def __post_init__(self) -> None:
        """Count the bytes of each fragment."""
        super().__post_init__()
        sizes = [self.state.num_elements(p) for p in range(self.state.num_fragments)]
        num_bytes = [self._reduction.bytes_sent(size, len(self.cohort.members)) for size in sizes]
        over_shards = sum_over_shards(torch.tensor(num_bytes, device=self.parameters.device), self._shard_group)
        self._fragment_bytes: list[int] = over_shards.tolist()

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        return self.transport.replica

    @property
    def sent_from(self) -> torch.device:
        """The device in whose memory payloads are."""
        return torch.device("cpu") if self.lane.is_apart else self.parameters.device

    @property
    def answers(self) -> Answers | None:
        """The other replicas' answers; None with a transport of one's own that does not know them."""
        return getattr(self.transport, "answers", None)

    def key(self, sync: Sync) -> Key:
        """The key of this replica's payloads of a round."""
        return Key(self.settings.seed, sync.fragment, sync.round, self.transport.replica, shard=self._shard)

    def send(self, syncs: Sequence[Sync]) -> None:
        """Encode everything first, so that nothing is sent if anything can't be, in any shard of the replica."""
        with self.all_shards_or_none():
            self.check_parameters(sync.fragment for sync in syncs)
            with self.record.encoding():
                encoded = [self._encode(sync) for sync in syncs]
            for sync, (one, _) in zip(syncs, encoded, strict=True):
                own = partial(one.own, self.state.num_elements(sync.fragment), self.key(sync))
                self.lane.queue(partial(self.on_send, sync, own))
        for sync, (one, sealed) in zip(syncs, encoded, strict=True):
            if one.error_N is not None:
                self.lane.queue(partial(self.keep_error, sync.fragment, one.error_N))
            self.start(sync, self._reduction, sealed)
            self.bytes_sent += self._fragment_bytes[sync.fragment]
            self.last_sent[sync.fragment] = sync.step

    def start(self, sync: Sync, reduction: Reduction, sealed: Callable[[], tuple[Tensor, ...]]) -> None:
        """Start to bring every member what it needs of a round, as soon as its payloads are sealed."""
        num_elements, key, cohort = self.state.num_elements(sync.fragment), self.key(sync), self.cohort
        tag = Tag(Channel.PAYLOAD, key.fragment, key.round, shard=key.shard, step=sync.step)

        def send() -> Sent:
            payloads, how = sealed(), (self.transport, self.relays, reduction)
            return Sent(payloads, exchange(*how, payloads, num_elements, key, cohort, tag))

        self.in_flight.append(Round(sync, reduction, self.sends.run(send), cohort))

    def check_sends(self) -> None:
        """Raise what a send has met since it was begun; shards, which fail together, do so at the merge.

        Raises:
            NonFiniteError, UserError: if an outer gradient is not finite, or a merge was undone; it was not sent.
        """
        for flight in self.in_flight if self._shard_group is None else ():
            if flight.sent.has_ended():
                with self._naming(flight.sync):
                    self._sent(flight)

    def merge(self, syncs: Sequence[Sync], *, forget: int) -> tuple[OuterStep, ...]:
        """Wait for everything first, so that a failure leaves all parameters as they were, in all shards.

        Args:
            syncs: the rounds to merge, in order.
            forget: the step up to which no replica needs what was sent any more, not even after a resume.
        """
        due = [flight for sync in syncs for flight in self.in_flight if flight.sync == sync]
        assert len(due) == len(syncs), "what is due was sent"
        # Merged here before a resume, and sent again for the sake of a slower replica.
        again = [
            flight
            for flight in self.in_flight
            if flight.sync.step <= forget and not flight.received and flight.sync not in syncs
        ]
        self.in_flight = [flight for flight in self.in_flight if flight.sync.step > forget]
        if not due and not again:
            return ()  # most steps: the shards have nothing to tell each other
        with self.all_shards_or_none():
            self.parameters.watch.check()
            for flight in again:
                self._receive(flight)
            received = [self._receive(flight) for flight in due]
            averages = [
                self._average(flight, payloads, first=not i)
                for i, (flight, (payloads, _)) in enumerate(zip(due, received, strict=True))
            ]
        return tuple(
            self._outer_step(flight, average, payloads, blocked_seconds)
            for flight, average, (payloads, blocked_seconds) in zip(due, averages, received, strict=True)
        )

    def sent(self) -> Iterator[Tensor]:
        """For each fragment the decoded outer gradient in flight, flat FP32 (N); zeros where there is none."""
        flights = {flight.sync.fragment: flight for flight in self.in_flight}
        assert len(flights) == len(self.in_flight), "τ < H on every replica: a fragment is in flight once"
        for p in range(self.state.num_fragments):
            num_elements = self.state.num_elements(p)
            if (flight := flights.get(p)) is None:
                # On the CPU, where zeros take no memory until they are written.
                yield torch.zeros(num_elements, dtype=torch.float32, device="cpu")
            else:
                yield flight.reduction.decode(self._sent(flight).payloads, num_elements, self.key(flight.sync))

    def expect_next(self) -> None:
        """Announce the fragment that is sent or merged next, and the kinds of its vectors that will be used."""
        schedule = self.settings.schedule
        for step in range(self.num_steps + 1, self.num_steps + schedule.sync_every + 1):
            due = schedule.due(step, self.transport.replica)
            if due.send or due.merge:
                kinds = (ERROR,) if due.send else self.settings.outer.slots
                self.state.expect((OUTER, *kinds), (due.send or due.merge)[0].fragment)
                return

    def _encode(self, sync: Sync) -> tuple[Encoded, Callable[[], tuple[Tensor, ...]]]:
        """The outer gradient of a fragment, and what seals its payloads; those of a CPU are sealed now."""
        is_compared = self.settings.outer.shared and len(self.cohort.members) > 1
        base = None if is_compared else 0
        encoded = self.begin_encoding(sync.fragment, self.key(sync), self.cohort, base=base)
        if self.lane.is_apart:
            return encoded, encoded.sealed
        with self.naming_non_finite(sync.fragment, sync.step):
            payloads = encoded.sealed()
        return encoded, lambda: payloads

    def _sent(self, flight: Round) -> Sent:
        """The send of a round, when it is over."""
        with self.naming_non_finite(flight.sync.fragment, flight.sync.step):
            return flight.sent.wait()

    def _receive(self, flight: Round) -> tuple[dict[int, Tensor], float]:
        """The payloads of all members, and the seconds that training waited for them."""
        start = time.perf_counter()
        with self._naming(flight.sync):
            payloads = self._sent(flight).exchanged.wait()
        blocked_seconds = time.perf_counter() - start
        flight.received = True
        self.blocked_seconds += blocked_seconds
        num_elements, num_members = self.state.num_elements(flight.sync.fragment), len(flight.cohort.members)
        num_bytes = flight.reduction.bytes_sent(num_elements, num_members)
        self.record.received(num_bytes, time.perf_counter() - flight.started, blocked_seconds)
        return payloads, blocked_seconds

    def _average(self, flight: Round, payloads: dict[int, Tensor], *, first: bool) -> Average:
        """The average of the outer gradients; of the first round that is due, in the memory kept for that."""
        scratch_N = self._scratch[: self.state.num_elements(flight.sync.fragment)]

        def work() -> Average:
            to_N = scratch_N if first else torch.empty_like(scratch_N)
            return flight.reduction.average(payloads, to_N, self.key(flight.sync), flight.cohort)

        with self._naming(flight.sync), self.record.merging():
            return self.lane.queue(work, after_training=False)

    @contextmanager
    def _naming(self, sync: Sync) -> Iterator[None]:
        """Say in which step and round an exchange failed."""
        try:
            yield
        except ExchangeError as error:
            raise ExchangeError(f"step {self.num_steps}: {error}", error.missing) from error
        except (DisagreementError, PayloadError) as error:
            where = f"step {self.num_steps}: fragment {sync.fragment}, round {sync.round}"
            raise type(error)(f"{where}: {error}") from error

    def _outer_step(
        self, flight: Round, average: Average, payloads: dict[int, Tensor], blocked_seconds: float
    ) -> OuterStep:
        sync, p = flight.sync, flight.sync.fragment
        self.bytes_received += self._fragment_bytes[p]
        self.take(sync, average, flight.cohort, self.settings.mixing)
        return outer_step(
            flight.reduction,
            payloads,
            sync,
            self.key(sync),
            flight.cohort,
            like_N=average.total_N,
            blocked_seconds=blocked_seconds,
            spans=self.parameters.spans[p],
            shard_group=self._shard_group,
            lane=self.lane,
        )


def begin(
    settings: Settings, transport: Transport, parameters: FragmentParameters, *, offload: bool = False
) -> Rounds:
    """The rounds of all replicas of a transport, before the first: Θ is the parameters as they are."""
    state = outer_state(settings, parameters, offload=offload)
    lane, cohort = device_lane(parameters.device, transport.device), Cohort.equal(transport.num_replicas)
    sends = QueueLane() if lane.is_apart else HereLane()
    return Rounds(settings, parameters, state, transport=transport, cohort=cohort, lane=lane, sends=sends)


def finish(rounds: Rounds, *, flush: bool) -> tuple[OuterStep, ...]:
    """Receive what is in flight and merge it, in order.

    Args:
        rounds: the engine's.
        flush: send and merge every fragment once more that was not sent after the last inner step, one at a time.

    Raises:
        DisagreementError: if the replicas have taken different numbers of steps, or only some of them flush.
    """
    schedule, step = rounds.settings.schedule, rounds.num_steps
    fragments = [p for p, last_sent in enumerate(rounds.last_sent) if flush and last_sent < step]
    facts = {"number of inner steps at finish()": step, "fragments that finish() flushes": fragments}
    agree(rounds.transport, facts)
    first_step = step - schedule.overlap(rounds.transport.replica) + 1
    due = [flight.sync for flight in rounds.in_flight if flight.sync.step >= first_step]
    merged = rounds.merge(due, forget=step)
    for p in fragments:
        # The number of its next round: rounds in flight together have different ones.
        sync = Sync(p, schedule.num_sent(p, step) + 1, step)
        rounds.send((sync,))
        merged += rounds.merge((sync,), forget=step)
    return merged


def warn_of_unsent(rounds: ReplicaRounds) -> None:
    """Name the fragments that were never sent; the warning points to the caller's caller."""
    unsent = [p for p in range(len(rounds.last_sent)) if rounds.is_initial(p)]
    if unsent and rounds.num_steps:
        names = ", ".join(
            f"fragment {p} ({rounds.settings.fragments[p].parameters[0]}, …) was never sent" for p in unsent
        )
        warnings.warn(
            f"after {rounds.num_steps} inner steps {names}, and its outer parameters are the initial ones: call "
            "finish(flush=True), or choose a smaller sync_every",
            stacklevel=3,
        )


def warn_of_uncounted(rounds: ReplicaRounds) -> None:
    """Name the fragments whose last work no outer step has counted; the warning points to the caller's caller."""
    fragments = [p for p in range(len(rounds.last_sent)) if rounds.has_uncounted(p)]
    if fragments:
        warnings.warn(
            f"the outer parameters lack this replica's last work on fragments {fragments}: its payloads were more "
            "than max_stale outer steps late, or left out for their norms; call finish(flush=True) again",
            stacklevel=3,
        )


def adopt(rounds: Rounds) -> None:
    """Θ ← θ, and zeros for all other vectors; it is refused on all replicas, or on none.

    Raises:
        DisagreementError: if θ or the number of inner steps differ between replicas.
        UserError: if something is in flight, or a parameter was replaced.
    """
    parameters, refusal = rounds.parameters, None
    fragments = range(rounds.state.num_fragments)
    in_flight = [list(flight.sync) for flight in rounds.in_flight]
    try:
        parameters.check_still_the_models(fragments)
        if in_flight:
            raise UserError(f"fragment {in_flight[0][0]} is in flight: call finish() before adopt()")
    except UserError as error:
        refusal = str(error)
    facts = {
        "why adopt() is refused": refusal,
        "number of inner steps at adopt()": rounds.num_steps,
        "the model's parameters at adopt(), which all replicas must have loaded alike (SHA-256)": [
            parameters_hash({"θ": parameters.flat(p)}) for p in fragments
        ],
    }
    with rounds.all_shards_or_none():
        refuse_together(rounds, facts, refusal)
    for kind in rounds.state.kinds:
        for p, vector_N in enumerate(rounds.state.at_home(kind)):
            if kind == OUTER:
                vector_N.copy_(parameters.flat(p))
            else:
                vector_N.zero_()


class FixedMembership:
    """This replica in the group of a transport.

    Raises:
        UserError: if the transport can't do what the settings need.
        DisagreementError: if the replicas were given different settings or initial parameters.
    """

    def __init__(
        self, settings: Settings, transport: Transport, parameters: FragmentParameters, *, offload: bool
    ) -> None:
        self.rounds = begin(settings, transport, parameters, offload=offload)
        self._schedule, self._transport = settings.schedule, transport
        self._due = Due((), ())
        initial = self.rounds.state.at_home(OUTER)
        agree(transport, settings.facts(transport.num_replicas) | parameters.facts(initial))

    @property
    def failure(self) -> str | None:
        """The other replica that has failed, and its reason; None as far as is known."""
        return self._transport.failure

    def failing_together(self) -> AbstractContextManager[None]:
        """A context whose errors the other replicas hear of."""
        return failing_together(self._transport)

    def is_due(self) -> bool:
        """True if something is sent, merged, in flight, or to be looked at."""
        rounds = self.rounds
        self._due = due = self._schedule.due(rounds.num_steps, self._transport.replica)
        return bool(due.send or due.merge or rounds.in_flight or rounds.parameters.watch.merges)

    def advance(self) -> tuple[OuterStep, ...]:
        """Send and merge as the schedule says."""
        rounds, due = self.rounds, self._due
        rounds.check_sends()
        rounds.parameters.look_at_merges(rounds.num_steps)
        if due.send:
            rounds.send(due.send)
        merge = [sync for sync in due.merge if sync.step > rounds.drained_step]
        merged = rounds.merge(merge, forget=rounds.num_steps - self._schedule.max_overlap)
        if due.send or due.merge:
            rounds.expect_next()
        return merged

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step."""
        with self._transport.finishing(self.rounds.num_steps):
            merged = finish(self.rounds, flush=flush)
            self.rounds.drained_step = self.rounds.num_steps
        return merged

    def adopt(self) -> None:
        """Θ ← θ, on all replicas."""
        adopt(self.rounds)

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, what is in flight included."""
        return checkpoint.state_of(self.rounds)

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state as this engine takes it up; it is refused on all replicas, or on none."""
        return loadable(self.rounds, state)

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight."""
        checkpoint.load(self.rounds, accepted)
