"""The rounds of the fragments: encode and send, wait for the others, take the outer step and merge.

Shapes: N elements of one fragment that this process holds.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.engine import observe
from diloco.engine.encoded import Encoded
from diloco.engine.lanes import Handle, HereLane, Lane, QueueLane, Started, ThreadLane, device_lane
from diloco.engine.parameters import FragmentParameters
from diloco.engine.phases import exchange
from diloco.engine.replica_rounds import ReplicaRounds, outer_state
from diloco.engine.settings import Settings
from diloco.engine.sharded import sum_over_shards
from diloco.engine.state import ERROR, OUTER
from diloco.errors import DisagreementError, ExchangeError, PayloadError
from diloco.exchange.messages import Answers
from diloco.exchange.transport import Channel, Tag, Transport
from diloco.outer.step import OuterStep
from diloco.reduction import Reduction
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average
from diloco.schedule import Sync
from diloco.wire.payload import Key


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
        return observe.outer_step(
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
