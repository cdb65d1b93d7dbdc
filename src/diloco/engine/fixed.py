"""A fixed group of replicas, which a transport joins: they take the same steps, and all are in every outer step.

Shapes: N elements of one fragment that this process holds.
"""

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from diloco.engine.checkpoint import agree_or_refuse, loadable
from diloco.engine.outer_state import ERROR, OUTER
from diloco.engine.parameters import INITIAL
from diloco.engine.replica import EqualGradients, Flight, Membership, Replica
from diloco.errors import DisagreementError, ExchangeError, PayloadError, UserError
from diloco.exchange.notices import in_thread
from diloco.exchange.process_group import Answers
from diloco.exchange.transport import SAME_NUMBER_OF_STEPS, Channel, Tag, Transport, agree, fail_together
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort, amount_of
from diloco.outer.digest import parameters_hash
from diloco.outer.step import OuterStep
from diloco.schedule import Due, Sync
from diloco.wire import codec
from diloco.wire.payload import Key, checksum

_SENDERS: "WeakValueDictionary[int, FixedMembership]" = WeakValueDictionary()
"""The membership that sent last over each transport, or its process group, by id()."""
_SAME_PARAMETERS = (
    "set the same seed before the model is made, make its parts in the same order, and build the engine before a "
    "checkpoint is loaded, or on its outer parameters, which all replicas share: state['outer']"
)


def exchange(
    transport: Transport, flight: Flight, check: Callable[[Flight, Mapping[int, Tensor]], None] | None = None
) -> Callable[[], dict[int, Tensor]]:
    """Start to exchange the payloads of a sealed flight between all members.

    A second phase follows in a thread as soon as the first is over. Where the weights are not equal, each payload
    of the first has its sender's amount behind it, and the flight's cohort is made of all of them.

    Args:
        transport: the way to the others.
        flight: this replica's.
        check: looks at the first phase's payload of every member.

    Returns:
        A function that waits for the last phase's payload of every member, this replica's own included.
    """
    reduction, size, key, cohort = flight.reduction, flight.num_elements, flight.key, flight.cohort
    tag = Tag(Channel.PAYLOAD, key.fragment, key.round, shard=key.shard, step=flight.sync.step)
    addressed = reduction.addressed(flight.payloads, cohort)
    first = _Phase(transport, addressed, tag, None if check is None else partial(check, flight), flight.amount)

    def receive() -> dict[int, Tensor]:
        received = first.wait()
        if flight.amount is not None:
            flight.cohort = Cohort.weighted(first.amounts)
        return received

    if reduction.num_phases == 1:
        return receive

    def relay() -> dict[int, Tensor]:
        average = reduction.relay(receive(), size, key, flight.cohort)
        return _Phase(transport, dict.fromkeys(cohort.members, average), tag._replace(phase=1)).wait()

    return in_thread(relay).result


class _Phase:
    """One phase of an exchange, with this replica's own payload beside the others'."""

    def __init__(
        self,
        transport: Transport,
        payloads: Mapping[int, Tensor],
        tag: Tag,
        check: Callable[[Mapping[int, Tensor]], None] | None = None,
        amount: float | None = None,
    ) -> None:
        others = {member: payload for member, payload in payloads.items() if member != transport.replica}
        self._own = {transport.replica: payloads[transport.replica]}
        self.amounts = {} if amount is None else {transport.replica: amount}
        """By member the amount that sets its weight, once its payload has come."""
        self._pending = transport.start(others if amount is None else _with_amount(others, amount), tag)
        self._check = check

    def wait(self) -> dict[int, Tensor]:
        received = self._pending.wait()
        if self.amounts:
            self.amounts |= {member: _amount_behind(payload, member) for member, payload in received.items()}
            received = {member: payload[:-_AMOUNT_BYTES] for member, payload in received.items()}
        received = {**received, **self._own}
        if self._check is not None:
            self._check(received)
        return received


_AMOUNT_BYTES = 16
"""A double (little-endian), and its checksum."""


def _with_amount(payloads: Mapping[int, Tensor], amount: float) -> dict[int, Tensor]:
    """Payloads with this replica's amount behind them."""
    packed = struct.pack("<d", amount)
    behind = torch.frombuffer(bytearray(packed + checksum(packed).to_bytes(8, "little")), dtype=torch.uint8)
    longer = {id(payload): torch.cat((payload, behind.to(payload.device))) for payload in payloads.values()}
    return {member: longer[id(payload)] for member, payload in payloads.items()}


def _amount_behind(payload: Tensor, member: int) -> float:
    """The amount behind a payload.

    Raises:
        PayloadError: if it is damaged.
    """
    behind = payload[-_AMOUNT_BYTES:].cpu().numpy().tobytes()
    if checksum(behind[:8]) != int.from_bytes(behind[8:], "little"):
        raise PayloadError(f"replica {member}: the weight behind its payload was damaged on the way, or in memory")
    return struct.unpack("<d", behind[:8])[0]


class FixedMembership(Membership):
    """This replica in the group of a transport.

    Args:
        replica: this one; θ and Θ are those of the run's beginning.
        transport: the way to the others.

    Raises:
        DisagreementError: if the replicas were given different settings or initial parameters.
    """

    def __init__(self, replica: Replica, transport: Transport) -> None:
        self.replica, self.transport = replica, transport
        self.cohort = Cohort.equal(transport.num_replicas)
        """The replicas of the outer steps that begin now."""
        self.start_send: Starter = SenderThread().start if replica.lane.is_apart else run_now
        """Runs a send now, or, where it must wait for a GPU, in a thread."""
        self.in_flight: list[Flight] = []
        """In the order in which they were sent."""
        self.weighed = [(0, 0.0)] * replica.state.num_fragments
        """For each fragment the tokens read up to its last send, and the amount that set its weight."""
        self.drained_step = 0
        """The last step at which `finish` merged everything that was sent."""
        self._channel = getattr(transport, "group", transport)
        """The process group, or the transport that has none: two engines over one would mix their payloads."""
        self._schedule, self._due = replica.settings.schedule, Due((), ())
        self._shard = replica.parameters.group.index
        self._fragment_bytes = self._bytes_by_fragment()
        self._equal = EqualGradients(replica.state.num_fragments)
        initial = replica.state.at_home(OUTER)
        with replica.fail_together():
            replica.parameters.check_copies(range(replica.state.num_fragments))
        facts = replica.settings.facts(transport.num_replicas) | replica.parameters.facts(initial)
        agree(transport, facts, remedies={INITIAL: _SAME_PARAMETERS})

    def _bytes_by_fragment(self) -> list[int]:
        """Payload bytes that all shards of this replica send, and receive, for each fragment."""
        replica = self.replica
        sizes = [replica.state.num_elements(p) for p in range(replica.state.num_fragments)]
        num_bytes = [replica.reduction.bytes_sent(size, len(self.cohort.members)) for size in sizes]
        of_shard = torch.tensor(num_bytes, dtype=torch.int64, device=replica.parameters.device)
        return replica.parameters.group.reduce(of_shard).tolist()

    @property
    def failure(self) -> str | None:
        """The other replica that has failed, and its reason; None as far as is known."""
        return self.transport.failure

    @property
    def answers(self) -> Answers | None:
        """The other replicas' answers; None with a transport of one's own that does not know them."""
        return getattr(self.transport, "answers", None)

    def initial_fragments(self) -> Sequence[int]:
        """The fragments that were never sent."""
        return [p for p, last_sent in enumerate(self.replica.last_sent) if not last_sent]

    def fail_together(self) -> AbstractContextManager[None]:
        """A context whose errors the other replicas hear of."""
        return fail_together(self.transport)

    def look(self) -> bool:
        """True if something is sent, merged, in flight, or to be looked at."""
        self._due = due = self._schedule.due(self.replica.num_steps, self.transport.replica)
        return bool(due.send or due.merge or self.in_flight or self.replica.parameters.watch.merges)

    def advance(self) -> tuple[OuterStep, ...]:
        """Send and merge as the schedule says."""
        step, due = self.replica.num_steps, self._due
        self._check_alone()
        self._check_sends()
        self.replica.parameters.look_at_merges(step)
        if due.send:
            self.send(due.send)
        merge = [sync for sync in due.merge if sync.step > self.drained_step]
        merged = self.merge(merge, forget=step - self._schedule.max_overlap)
        if due.send or due.merge:
            self.expect_next()
        return merged

    def expect_next(self) -> None:
        """Announce the fragment that is sent or merged next, and the kinds of its vectors that will be used."""
        schedule, now = self._schedule, self.replica.num_steps
        for step in range(now + 1, now + schedule.sync_every + 1):
            due = schedule.due(step, self.transport.replica)
            if due.send or due.merge:
                kinds = (ERROR,) if due.send else self.replica.settings.outer.slots
                self.replica.state.expect((OUTER, *kinds), (due.send or due.merge)[0].fragment)
                return

    def send(self, syncs: Sequence[Sync]) -> None:
        """Encode everything first, so that nothing is sent if anything can't be, in any shard of the replica."""
        replica = self.replica
        with replica.fail_together():
            # Copies of a shard that can drift apart differ by the first send already.
            replica.parameters.check_copies(sync.fragment for sync in syncs if sync.round == 1)
            replica.check_parameters(sync.fragment for sync in syncs)
            amounts = [self._amount(sync) for sync in syncs]
            with replica.record.timing_encode():
                flights = [self._encode(sync) for sync in syncs]
            for flight in flights:
                replica.lane.queue(partial(replica.on_send, flight.sync, flight.own, flight.cohort))
        for flight, own_amount in zip(flights, amounts, strict=True):
            p, error_N, flight.error_N = flight.sync.fragment, flight.error_N, None
            flight.amount, self.weighed[p] = own_amount, (replica.tokens, own_amount or 0.0)
            if replica.settings.outer.merges_at_send:
                replica.enter_outer(p)
            if error_N is not None:
                replica.lane.queue(partial(replica.keep_error, p, error_N))
            self._start(flight)
            replica.bytes_sent += self._fragment_bytes[p]
            replica.last_sent[p] = flight.sync.step

    def _amount(self, sync: Sync) -> float | None:
        """The amount that sets the weight of this replica's outer gradient; None with equal weights.

        Raises:
            UserError: if no token was read since the fragment's last send.
        """
        replica, weights, p = self.replica, self.replica.settings.weights, sync.fragment
        if weights == "equal":
            return None
        tokens, steps = replica.tokens - self.weighed[p][0], sync.step - replica.last_sent[p]
        if tokens <= 0:
            raise UserError(
                f"step {sync.step}: the last {steps} inner steps read no token, and weights={weights} weighs by "
                "them: pass engine.step(tokens=…), or engine.attach(optimizer, tokens=…)",
                "tokens",
            )
        return float(amount_of(weights, tokens=tokens, steps=steps))

    def _encode(self, sync: Sync) -> Flight:
        """The flight of a fragment; on a CPU it is sealed."""
        replica = self.replica
        is_compared = replica.settings.outer.shared and len(self.cohort.members) > 1
        flight = replica.encode(sync, self.key(sync), self.cohort, base=None if is_compared else 0)
        if not replica.lane.is_apart:
            with replica.naming_non_finite(sync):
                flight.seal()
        return flight

    def key(self, sync: Sync) -> Key:
        """The key of this replica's payloads of a sync."""
        seed = self.replica.settings.seed
        return Key(seed, sync.fragment, sync.round, self.transport.replica, shard=self._shard)

    def _start(self, flight: Flight) -> None:
        """Send a flight as soon as it is sealed."""

        def send() -> Callable[[], dict[int, Tensor]]:
            flight.seal()
            return exchange(self.transport, flight, self._refuse_equal if flight.sync.round == 1 else None)

        _SENDERS[id(self._channel)] = self
        flight.sent, flight.started = self.start_send(send), time.perf_counter()
        self.in_flight.append(flight)

    def _check_alone(self) -> None:
        """Refuse to go on if another engine has sent over the same way while this one had something in flight.

        No tag names an engine, so that one would take the other's payloads for its own.

        Raises:
            UserError: saying how to separate them.
        """
        sender = _SENDERS.get(id(self._channel))
        if sender is None or sender is self or all(flight.is_received for flight in self.in_flight):
            return
        if self.transport.num_replicas > 1:
            raise UserError(
                f"step {self.replica.num_steps}: another engine has sent over the same exchange, or the same "
                "process group, while this one had something in flight, and their payloads can't be told apart: "
                "give each engine a group or a diloco.connect of its own, or call finish() of one before the "
                "other steps",
                "exchange",
            )

    def _refuse_equal(self, flight: Flight, received: Mapping[int, Tensor]) -> None:
        """Refuse to go on if two replicas made the same outer gradients, in the first round of every fragment.

        Raises:
            UserError: naming the two, and what makes them equal.
        """
        args = flight.reduction, flight.num_elements, flight.key, flight.cohort
        for one, other in self._equal.look(flight.sync.fragment, received, *args):
            raise UserError(
                f"replicas {one} and {other} made the same outer gradients of all fragments, to the last bit: "
                "either gradients are averaged across replicas, by DDP or another user of a process group that "
                "spans them (make each replica a job of its own, joined by diloco.connect, or give it a group of "
                "its own), or they train on the same data (give each a share of its own)"
            )

    def _check_sends(self) -> None:
        """Raise the error of a send that has failed since it began; shards fail together, at the merge.

        Raises:
            NonFiniteError, UserError: if an outer gradient is not finite, or a merge was undone; it was not sent.
        """
        for flight in self.in_flight if self.replica.parameters.group.size == 1 else ():
            if flight.sent is not None and flight.sent.done():
                with self._naming(flight.sync):
                    self._wait_for_send(flight)

    def _wait_for_send(self, flight: Flight) -> Callable[[], dict[int, Tensor]]:
        """Wait until a flight is sealed and sent; returns the function that waits for all members' payloads."""
        assert flight.sent is not None, "it was started"
        with self.replica.naming_non_finite(flight.sync):
            return flight.sent.result()

    def merge(self, syncs: Sequence[Sync], *, forget: int) -> tuple[OuterStep, ...]:
        """Wait for all payloads before merging, so that a failure changes no parameter in any shard.

        Args:
            syncs: of the flights to merge, in order.
            forget: the step up to which no replica needs sent payloads any more, not even after a resume.
        """
        due = [flight for sync in syncs for flight in self.in_flight if flight.sync == sync]
        assert len(due) == len(syncs), "what is due was sent"
        # Merged here before a resume, and sent again for the sake of a slower replica.
        again = [
            flight
            for flight in self.in_flight
            if flight.sync.step <= forget and not flight.is_received and flight.sync not in syncs
        ]
        self.in_flight = [flight for flight in self.in_flight if flight.sync.step > forget]
        if not due and not again:
            return ()  # most steps: the shards have nothing to tell each other
        with self.replica.fail_together():
            for flight in again:
                self._receive(flight)
            received = [self._receive(flight) for flight in due]
            averages = [
                self._average(flight, payloads, first=not i)
                for i, (flight, (payloads, _)) in enumerate(zip(due, received, strict=True))
            ]
        steps = []
        for flight, average, (payloads, blocked_seconds) in zip(due, averages, received, strict=True):
            self.replica.bytes_received += self._fragment_bytes[flight.sync.fragment]
            self.replica.take(flight.sync, average, flight.cohort, self.replica.settings.mixing)
            steps.append(self.replica.describe_flight(flight, payloads, average, blocked_seconds=blocked_seconds))
        return tuple(steps)

    def _receive(self, flight: Flight) -> tuple[dict[int, Tensor], float]:
        """The payloads of all members, and the seconds that training waited for them."""
        start = time.perf_counter()
        with self._naming(flight.sync):
            payloads = self._wait_for_send(flight)()
        blocked_seconds = time.perf_counter() - start
        flight.is_received = True
        self.replica.blocked_seconds += blocked_seconds
        num_bytes = flight.reduction.bytes_sent(flight.num_elements, len(flight.cohort.members))
        self.replica.record.received(num_bytes, time.perf_counter() - flight.started, blocked_seconds)
        return payloads, blocked_seconds

    def _average(self, flight: Flight, payloads: dict[int, Tensor], *, first: bool) -> Average:
        """The average of the outer gradients; of the first flight that is due, in the memory kept for that."""
        replica, scratch_N = self.replica, self.replica.scratch(flight.sync.fragment)

        def work() -> Average:
            to_N = scratch_N if first else torch.empty_like(scratch_N)
            return flight.reduction.average(payloads, to_N, flight.key, flight.cohort)

        with self._naming(flight.sync), replica.record.timing_merge():
            return replica.lane.queue(work, after_training=False)

    @contextmanager
    def _naming(self, sync: Sync) -> Iterator[None]:
        """Say in which step and round an exchange failed."""
        step = self.replica.num_steps
        try:
            yield
        except ExchangeError as error:
            raise ExchangeError(f"step {step}: {error}", error.missing) from error
        except (DisagreementError, PayloadError) as error:
            where = f"step {step}: fragment {sync.fragment}, round {sync.round}"
            raise type(error)(f"{where}: {error}") from error

    def finish(self, *, flush: bool, close: bool) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step.

        Args:
            flush: send and merge every fragment once more that was not sent after the last inner step, one at a
                time.
            close: without effect, since all replicas end together.

        Raises:
            DisagreementError: if the replicas have taken different numbers of steps, or only some of them flush.
        """
        del close
        step = self.replica.num_steps
        self._check_alone()
        with self.transport.finishing(step):
            fragments = [p for p, last_sent in enumerate(self.replica.last_sent) if flush and last_sent < step]
            num_steps = "number of inner steps at finish()"
            facts = {num_steps: step, "fragments that finish() flushes": fragments}
            agree(self.transport, facts, remedies={num_steps: SAME_NUMBER_OF_STEPS})
            first_step = step - self._schedule.overlap(self.transport.replica) + 1
            with self.replica.fail_together():
                self.replica.parameters.watch.check_of_merges(step)()
            merged = self.merge([f.sync for f in self.in_flight if f.sync.step >= first_step], forget=step)
            for p in fragments:
                # The number of its next round: rounds in flight together have different ones.
                sync = Sync(p, self._schedule.num_sent(p, step) + 1, step)
                self.send((sync,))
                merged += self.merge((sync,), forget=step)
            self.drained_step = step
        return merged

    def reset_outer(self) -> None:
        """Θ ← θ, and zeros for all other vectors; it is refused on all replicas, or on none.

        Raises:
            DisagreementError: if θ or the number of inner steps differ between replicas.
            UserError: if something is in flight, or a parameter was replaced, or loaded without its master.
        """
        parameters, state, refusal = self.replica.parameters, self.replica.state, None
        fragments = range(state.num_fragments)
        try:
            parameters.check_still_the_models(fragments)
            parameters.check_masters()
            if self.in_flight:
                p = self.in_flight[0].sync.fragment
                raise UserError(f"fragment {p} is in flight: call finish() before reset_outer()")
        except UserError as error:
            refusal = str(error)
        facts = {
            "why reset_outer() is refused": refusal,
            "number of inner steps at reset_outer()": self.replica.num_steps,
            "the model's parameters at reset_outer(), which all replicas must have loaded alike (SHA-256)": [
                parameters_hash({"θ": parameters.flat(p)}) for p in fragments
            ],
        }
        with self.replica.fail_together():
            agree_or_refuse(self.transport, facts, refusal)
        for kind in state.kinds:
            for p, vector_N in enumerate(state.at_home(kind)):
                if kind == OUTER:
                    vector_N.copy_(parameters.flat(p))
                else:
                    vector_N.zero_()
        self.weighed = [(self.replica.tokens, 0.0)] * state.num_fragments
        self.replica.forget_averages()

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, what is in flight included.

        Keys and shapes are the same whatever is in flight, and Θ and the slots are the engine's own.
        """
        replica, named = self.replica, self.replica.parameters.all_named
        replica.lane.join()  # a send may still be writing the error
        settings = replica.settings
        return {
            **settings.facts_of_state(replica.number, self.transport.num_replicas),
            "fragments": [list(fragment.parameters) for fragment in settings.fragments],
            **replica.counters(),
            "drained_step": self.drained_step,
            "weighed": [list(each) for each in self.weighed],
            **{kind: named(replica.state.at_home(kind)) for kind in replica.state.kinds},
            "in_flight": [list(flight.sync) for flight in self.in_flight],
            "sent": named(self._sent()),
        }

    def _sent(self) -> Iterator[Tensor]:
        """For each fragment the decoded outer gradient in flight, flat FP32 (N); zeros where there is none."""
        flights = {flight.sync.fragment: flight for flight in self.in_flight}
        assert len(flights) == len(self.in_flight), "τ < H on every replica: a fragment is in flight once"
        for p in range(self.replica.state.num_fragments):
            if (flight := flights.get(p)) is None:
                # On the CPU, where zeros take no memory until they are written.
                yield torch.zeros(self.replica.state.num_elements(p), dtype=torch.float32, device="cpu")
            else:
                with self._naming(flight.sync):
                    self._wait_for_send(flight)
                    own_N = flight.own()
                yield own_N

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state as this engine takes it up; it is refused on all replicas, or on none."""
        return loadable(self.replica, self.transport, state)

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight."""
        replica = self.replica
        replica.resume(accepted)
        replica.lane.join()  # a send may still be writing the error
        for kind in replica.state.kinds:
            for p, flat_N in enumerate(replica.state.at_home(kind)):
                flat_N.copy_(replica.parameters.flat_of(p, accepted[kind]))
        self.in_flight, self.weighed = [], list(accepted["weighed"])
        # In fp32, since what was sent is rounded already: so the state may be cut into other shards.
        reduction = replica.reduction.with_wire(codec("fp32"))
        sent_from = torch.device("cpu") if replica.lane.is_apart else replica.parameters.device
        for sync in (Sync(*values) for values in accepted["in_flight"]):
            sent_N, key = replica.parameters.flat_of(sync.fragment, accepted["sent"]).to(sent_from), self.key(sync)
            self._start(
                Flight(
                    sync=sync,
                    key=key,
                    cohort=self.cohort,
                    num_elements=sent_N.numel(),
                    reduction=reduction,
                    payloads=reduction.encode(sent_N, key, self.cohort),
                    amount=None if replica.settings.weights == "equal" else self.weighed[sync.fragment][1],
                )
            )
        # With nothing in flight nothing is left to merge, whatever another schedule would have sent.
        self.drained_step = accepted["drained_step"] if accepted["in_flight"] else replica.num_steps


T = TypeVar("T")
Starter: TypeAlias = Callable[[Callable[[], Any]], "Future[Any]"]
"""Starts work of the host, and returns the future of its result."""


def run_now(work: Callable[[], T]) -> "Future[T]":
    """Do the work in the training thread, and raise there.

    >>> run_now(lambda: 1 + 1).result()
    2
    """
    result: Future[T] = Future()
    result.set_result(work())
    return result


class SenderThread:
    """One daemon thread, which does the pieces of work in the order in which they were started.

    >>> SenderThread().start(lambda: 1 + 1).result()
    2
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, work: Callable[[], T]) -> "Future[T]":
        """Queue the work for the thread."""
        if self._thread is None:
            self._thread = Thread(target=_fulfil_all, args=(self._queue,), name="diloco sender", daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._queue.put((result, work))
        return result


def _fulfil_all(queue: "SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
    while True:
        _fulfil(*queue.get())


def _fulfil(result: "Future[T]", work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # raised again where the training loop waits
        result.set_exception(error)
