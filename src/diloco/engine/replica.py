"""A replica: θ, Θ, and what it does with them alone: outer gradients, outer steps and merges.

On a GPU, whose work runs in the order of a stream, outer gradients are encoded, copied, decoded and merged on a
lane: a stream beside that of training.

Shapes: N elements of one fragment that this process holds.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.engine.outer_state import ERROR, OUTER, SENT_THETA, OuterState
from diloco.engine.parameters import FragmentParameters, fill
from diloco.engine.settings import COUNTERS, Settings
from diloco.errors import NonFiniteError, UserError
from diloco.exchange.process_group import Answers
from diloco.outer.averages import Average, Reduction
from diloco.outer.cohort import Cohort
from diloco.outer.digest import outer_digest_on_device
from diloco.outer.merge import MergeRule, Past
from diloco.outer.rule import FragmentState
from diloco.outer.step import SHIFT, OuterStep, Samples, sampled, take_outer_step
from diloco.schedule import Sync
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.kernels.memory import begin_to_host, empty, has_streams, mark, pinned_copy
from diloco.wire.payload import Codec, Key, Unsealed, non_finite

T = TypeVar("T")


class DeviceLane:
    """The queue for work on the parameters' device: here that of training; a CPU works at once."""

    is_apart = False
    """True if the work is done later than it is queued, and the host must wait before it reads results."""

    def queue(self, work: Callable[[], T], *, after_training: bool = True) -> T:
        """Call a function that queues work; its result's tensors may be written later.

        Args:
            work: called now; its work begins after what was queued here earlier.
            after_training: begin after what training has queued so far, too.
        """
        return work()

    def join(self) -> None:
        """Let what training queues from now on begin after what was queued here."""

    def mark(self) -> Callable[[], None]:
        """A function by which any thread of the host waits for what was queued here so far."""
        return lambda: None  # reading a result waits by itself

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor where the host can read it after a wait; called in queued work."""
        return tensor


class WaitingLane(DeviceLane):
    """A GPU without streams, such as Apple's: training waits for the copies to the host."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory."""
        return tensor.cpu()


class StreamLane(DeviceLane):
    """A stream beside that of training, on a GPU."""

    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def queue(self, work: Callable[[], T], *, after_training: bool = True) -> T:
        """Call the function with the stream as the current one."""
        if after_training:
            self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            return work()

    def join(self) -> None:
        """Let the current stream wait."""
        self._module.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """The wait for an event of the stream."""
        return mark(self._device, self._stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory."""
        return pinned_copy(tensor)


def device_lane(device: torch.device, sent_from: torch.device) -> DeviceLane:
    """The lane of a device, and of the memory that payloads are sent from.

    Payloads that are sent from a GPU's own memory are sent in order, by the training loop: it waits for them.
    """
    if device.type == "cpu" or sent_from.type != "cpu":
        return DeviceLane()
    return StreamLane(device) if has_streams(device) else WaitingLane()


@dataclass(eq=False, kw_only=True)
class Flight:
    """An offer on its way: an outer gradient of this replica as payloads, from their encoding to their end.

    On a GPU, encoding may still be under way, and the payloads on their way to the host, until it is sealed.
    """

    sync: Sync
    """Fragment, round, and the inner step after which it is sent."""
    key: Key
    cohort: Cohort
    """The members whose outer gradients are averaged; with weights once the payloads of all have come."""
    num_elements: int
    """N."""
    reduction: Reduction
    """The way from the members' payloads to an average."""
    unsealed: Unsealed | None = None
    """The codec that wrote the payloads' bodies; None once they are sealed."""
    payloads: tuple[Tensor, ...]
    """The payloads: on the device without headers, and once they are sealed, where they are sent from."""
    error_N: Tensor | None = None
    """The error of error feedback that the payloads leave."""
    seal_work: Callable[[], tuple[Tensor, ...]] | None = None
    """Makes the sealed payloads; None afterwards."""
    sent: "Future[Callable[[], dict[int, Tensor]]] | None" = None
    """The send, which begins once it is sealed; its result waits for the payloads of all members."""
    started: float = 0.0
    """The time of its start, by `time.perf_counter`."""
    amount: float | None = None
    """The amount that sets this replica's weight, sent behind the payload; None with equal weights."""
    is_received: bool = False
    """True once the payloads of all members have come."""

    def own(self) -> Tensor:
        """The outer gradient as the other replicas will decode it, flat FP32 (N).

        Raises:
            PayloadError: if the payloads are sealed, and were damaged since.
        """
        reduction = self.reduction if self.unsealed is None else self.reduction.with_wire(self.unsealed)
        return reduction.decode(self.payloads, self.num_elements, self.key)

    def seal(self) -> None:
        """Wait for the device, and write the payloads' headers, unless that is done.

        Raises:
            NonFiniteError: if the outer gradient, with what error feedback adds, is not finite.
            UserError: if an earlier merge was undone.
        """
        if self.seal_work is not None:
            self.payloads, self.seal_work, self.unsealed = self.seal_work(), None, None


def copied_in_one(payloads: Sequence[Tensor], to_host: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Take payloads to the host in one copy."""
    if len(payloads) == 1:
        return (to_host(payloads[0]),)
    return to_host(torch.cat(list(payloads))).split([payload.numel() for payload in payloads])


@dataclass(eq=False)
class Record:
    """Measurements of an engine's syncs; those of earlier parts of a resumed run are not in it."""

    encode_seconds: float = 0.0
    """Time in which outer gradients were made and encoded."""
    merge_seconds: float = 0.0
    """Time in which payloads were decoded and averaged, and outer steps and merges taken."""
    exchange_mbit_s: float | None = None
    """Payload bits that this process sent in the last exchange, over the time until the others' had come."""
    was_waited_for: bool = False
    """True if training waited for that exchange; otherwise it was over earlier, and was faster."""
    _sample: tuple[Tensor, Tensor, Key] | None = None

    @contextmanager
    def timing_encode(self) -> Iterator[None]:
        """Time the work in this context as encoding."""
        start = time.perf_counter()
        yield
        self.encode_seconds += time.perf_counter() - start

    @contextmanager
    def timing_merge(self) -> Iterator[None]:
        """Time the work in this context as merging."""
        start = time.perf_counter()
        yield
        self.merge_seconds += time.perf_counter() - start

    def sample(self, delta_N: Tensor, outer_N: Tensor, key: Key) -> None:
        """Keep the first elements of an outer gradient and of Θ, to measure the codec's error later."""
        self._sample = delta_N[:_SAMPLED].clone(), outer_N[:_SAMPLED].clone(), key

    def received(self, num_bytes: int, seconds: float, blocked_seconds: float) -> None:
        """Note an exchange of so many bytes in each direction, and how long training waited for its end."""
        if num_bytes:
            self.exchange_mbit_s = num_bytes * 8e-6 / seconds
            self.was_waited_for = blocked_seconds > max(_NO_WAIT_SECONDS, _NO_WAIT_SHARE * seconds)

    def codec_errors(self, wire: Codec) -> tuple[Tensor, Tensor] | None:
        """‖Δ − decode(encode(Δ))‖² and ‖Δ‖² of the sample, on its device; None before the first sync."""
        if self._sample is None:
            return None
        (delta_N, outer_N, key), unsealed = self._sample, Unsealed(wire)
        payload = unsealed.encode(delta_N, key, outer_N=outer_N)
        error_N = unsealed.decode(payload, delta_N.numel(), key) - delta_N
        return error_N.square().sum(), delta_N.square().sum()


_SAMPLED = 1 << 14
_NO_WAIT_SECONDS = 1e-3
_NO_WAIT_SHARE = 0.05  # of an exchange's time: less may be the scheduler's delay, not the network's


def _non_finite(step: int, replica: int, fragment: int, parameter: str | None) -> NonFiniteError:
    """The error for an outer gradient that is not finite; `parameter` is None if error feedback made it so."""
    where = f"step {step}: the outer gradient of {parameter or 'some parameter'}"
    reason = "is not finite" if parameter else "is finite, but not with what error feedback adds"
    return NonFiniteError(
        f"{where} (replica {replica}, fragment {fragment}) {reason}; nothing was sent: lower the learning rate"
    )


@dataclass(eq=False)
class Replica:
    """θ, Θ, the settings and the counters of this replica; what it shares with others is a `Membership`'s."""

    settings: Settings
    parameters: FragmentParameters
    """θ."""
    state: OuterState
    """Θ, the slots of the outer rule, and the error."""
    number: int = 0
    """This replica's number; where replicas come and go, known once it has joined."""
    lane: DeviceLane = field(default_factory=DeviceLane)
    """The place where outer gradients are encoded, decoded and merged."""
    num_steps: int = 0
    """Inner steps taken."""
    tokens: int = 0
    """Tokens read, as far as the training loop tells."""
    bytes_sent: int = 0
    """Payload bytes of all shards, each destination counted."""
    bytes_received: int = 0
    """Payload bytes of all shards from the other replicas that were merged."""
    blocked_seconds: float = 0.0
    """Time in which training has waited for payloads."""
    last_sent: list[int] = field(init=False)
    """For each fragment the step after which it was sent last; 0 if never."""
    record: Record = field(default_factory=Record)
    """Measurements of the syncs, for logs."""

    def __post_init__(self) -> None:
        """Make the memory in which sums are made."""
        sizes = [self.state.num_elements(p) for p in range(self.state.num_fragments)]
        self.last_sent = [0] * len(sizes)
        self.reduction = self.settings.reduction
        """The way from payloads to an average."""
        self._scratch = empty(max(sizes), torch.float32, self.parameters.device)
        self._averages: dict[int, Tensor] = {}
        self.samples: dict[int, Samples] = {}
        """Elements of each fragment's last two averages, once there are two; the last merged fragment is last."""

    def counters(self) -> dict[str, Any]:
        """The plain values of a state that every replica has."""
        return {name: getattr(self, name) for name in COUNTERS} | {"last_sent": list(self.last_sent)}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up the plain values of a state."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.last_sent = list(state["last_sent"])
        self.forget_averages()

    def forget_averages(self) -> None:
        """Start the comparison of averages anew: Θ was changed by something other than outer steps."""
        self.samples.clear()
        self._averages.clear()

    def scratch(self, p: int) -> Tensor:
        """The memory in which one outer gradient or average of a fragment is made, FP32 (N)."""
        return self._scratch[: self.state.num_elements(p)]

    def fail_together(self) -> AbstractContextManager[None]:
        """A context that fails in all shards of this replica if it fails in one."""
        return self.parameters.fail_together(f"step {self.num_steps}: another shard of replica {self.number}")

    def check_parameters(self, fragments: Iterable[int]) -> None:
        """Refuse parameters that are no longer those of the model.

        Raises:
            UserError: naming step and parameter.
        """
        try:
            self.parameters.check_still_the_models(fragments)
        except UserError as error:
            raise UserError(f"step {self.num_steps}: {error}") from None

    def encode(self, sync: Sync, key: Key, cohort: Cohort, *, base: int | None) -> Flight:
        """Encode a fragment's outer gradient on the lane.

        Args:
            sync: the fragment, its round and the step.
            key: whose outer gradient it is.
            cohort: the members that share the fragment.
            base: the digest of Θ_p, 0 where nobody compares it; None to compute it.
        """
        p, beta, lane = sync.fragment, self.settings.error_feedback, self.lane
        lane.join()  # it has ended with the working memory
        self._keep_sent(p)
        outer_N = self.state.use(OUTER, p)
        delta_N = self.parameters.outer_gradient(p, outer_N, self.scratch(p))
        self.record.sample(delta_N, outer_N, key)
        check_merges = self.parameters.watch.check_of_merges(sync.step)
        if base is None and not lane.is_apart:
            base = self.state.digest(p)

        def work() -> Flight:
            """Encode the outer gradient, on the lane where there is one."""
            unsealed = Unsealed(self.settings.wire)
            reduction, error_N = self.reduction.with_wire(unsealed), None
            outer_N = self.state.use(OUTER, p) if self.settings.wire.needs_outer else None
            if beta is None:
                payloads = reduction.encode(delta_N, key, cohort, outer_N=outer_N)
            else:
                arguments = delta_N, self.state.use(ERROR, p), beta, key, cohort
                payloads, error_N = reduction.encode_with_feedback(*arguments, outer_N=outer_N)
            digests = [outer_digest_on_device(self.state.use(OUTER, p))] if base is None else []
            flags = torch.stack(unsealed.are_finite)
            # Beside the payloads, so that the host waits for the device once.
            notes = lane.to_host(torch.cat([*digests, flags.long()]) if digests else flags)
            on_host, wait = copied_in_one(payloads, lane.to_host), lane.mark()

            def seal() -> tuple[Tensor, ...]:
                """Wait for the payloads, and complete their headers."""
                wait()
                check_merges()
                values = notes.tolist()
                digest = values.pop(0) % (1 << 64) if base is None else base
                if not all(values):
                    raise non_finite()
                unsealed.seal_all(on_host, base=digest)
                return on_host

            return Flight(
                sync=sync,
                key=key,
                cohort=cohort,
                num_elements=delta_N.numel(),
                reduction=self.reduction,
                unsealed=unsealed,
                payloads=payloads,
                error_N=error_N,
                seal_work=seal,
            )

        return lane.queue(work)

    def _keep_sent(self, p: int) -> None:
        """Keep θ_p for a merge rule that needs it as it was sent."""
        if self.settings.mixing.needs_sent:
            self.state.use(SENT_THETA, p).copy_(self.parameters.flat(p))
            self.state.keep(SENT_THETA, p)

    @contextmanager
    def naming_non_finite(self, sync: Sync) -> Iterator[None]:
        """Name the parameter if an outer gradient was not finite when sealed; θ is still not finite."""
        try:
            yield
        except NonFiniteError:
            self.lane.join()
            p = sync.fragment
            outer_N = self.state.use(OUTER, p)
            delta_N = self.parameters.outer_gradient(p, outer_N, self.scratch(p))
            name = self.parameters.first_not_finite(p, delta_N)
            raise _non_finite(sync.step, self.number, p, name) from None

    def on_send(self, sync: Sync, own: Callable[[], Tensor], cohort: Cohort) -> Collection[str]:
        """Let the outer rule act on a fragment that is sent; the kinds of vectors that it used.

        Args:
            sync: the fragment, its round and the step.
            own: decodes its outer gradient.
            cohort: as in `OuterRule.on_send`.
        """
        with self._fragment(sync.fragment) as (fragment, used):
            self.settings.outer.on_send(fragment, own, sync, cohort)
        return used

    def enter_outer(self, p: int) -> None:
        """θ_p ← Θ_p, after what was queued on the lane."""
        with self.parameters.merging(p, self.num_steps) as theta:
            outer_N = self.state.use(OUTER, p)
            self.lane.queue(partial(fill, theta, outer_N))
            self.lane.join()

    def keep_error(self, p: int, error_N: Tensor) -> None:
        """Take the error that a payload leaves."""
        self.state.use(ERROR, p).copy_(error_N)
        self.state.keep(ERROR, p)

    def take(
        self, sync: Sync, average: Average, cohort: Cohort, merge_rule: MergeRule, *, is_shift: bool = False
    ) -> None:
        """Take an outer step of a fragment, or a shift of it, and merge it."""
        p = sync.fragment
        with (
            self.record.timing_merge(),
            self.parameters.merging(p, self.num_steps) as theta,
            self._fragment(p) as (fragment, _),
        ):
            rule = SHIFT if is_shift else self.settings.outer
            sample_n = torch.empty_like(sampled(average.total_N))
            past = self.past(p, sync.step)

            def work() -> None:
                sample_n.copy_(sampled(average.total_N))  # whose memory the rule may overwrite
                take_outer_step(rule, merge_rule, fragment, theta, average, sync, cohort, past)

            self.lane.queue(work)
            self.lane.join()
        if is_shift:
            return  # no average, which the next one is compared with
        before_n, self._averages[p] = self._averages.get(p), sample_n
        if before_n is not None:
            self.samples.pop(p, None)
            self.samples[p] = Samples(sample_n, before_n, average.total_N.numel() / max(1, sample_n.numel()))

    def past(self, p: int, sent: int) -> Past:
        """The values that a merge reads of a fragment that was sent after an inner step."""
        past = Past(num_steps=self.num_steps - sent, sync_every=self.settings.schedule.sync_every)
        return replace(past, theta_N=self.state.use(SENT_THETA, p)) if self.settings.mixing.needs_sent else past

    def describe_flight(
        self, flight: Flight, received: dict[int, Tensor], average: Average, *, blocked_seconds: float
    ) -> OuterStep:
        """An outer step that was taken with a flight, which makes averages and outer gradients again when asked.

        Args:
            flight: this replica's.
            received: the last phase's payload of every member.
            average: the average of the outer gradients; not kept, since its memory may be reused.
            blocked_seconds: how long training waited for the payloads.
        """
        size, device, reduction = flight.num_elements, average.total_N.device, flight.reduction
        key, cohort, lane = flight.key, flight.cohort, self.lane

        def make_average() -> Tensor:
            to_N = torch.empty(size, dtype=torch.float32, device=device)
            return reduction.average(received, to_N, key, cohort).divided()

        deltas = partial(reduction.each, received, size, key, device)
        step = self.describe(
            flight.sync,
            make_average,
            deltas,
            self.samples.get(key.fragment),
            blocked_seconds=blocked_seconds,
            cohort=None if flight.amount is None else cohort,
        )
        # The payloads have come: nothing waits for training.
        return replace(
            step, begin_work=lambda work: lane.queue(lambda: begin_to_host(work()), after_training=False)
        )

    def describe(
        self,
        sync: Sync,
        make_average: Callable[[], Tensor],
        make_deltas: Callable[[], Iterator[Tensor]],
        samples: Samples | None = None,
        *,
        blocked_seconds: float = 0.0,
        cohort: Cohort | None = None,
    ) -> OuterStep:
        """An outer step, from functions that recompute its vectors; see `OuterStep`."""
        spans, add_up = self.parameters.spans[sync.fragment], self.parameters.group.reduce
        return OuterStep(
            sync,
            blocked_seconds,
            make_average,
            make_deltas,
            spans,
            add_up,
            cohort,
            samples=samples,
            gain_at=self.settings.outer.gain,
        )

    @contextmanager
    def _fragment(self, p: int) -> Iterator[tuple[FragmentState, Collection[str]]]:
        """A fragment's state for the outer rule, and the kinds of vectors that the rule used, which are kept."""
        used: dict[str, None] = {}

        def use(kind: str) -> Tensor:
            used[kind] = None
            return self.state.use(kind, p)

        yield FragmentState(use, self.parameters.places[p], self.parameters.sum_over_parts), used.keys()
        for kind in used:
            self.state.keep(kind, p)


def outer_state(settings: Settings, parameters: FragmentParameters, *, offload: bool) -> OuterState:
    """The state before the first round: Θ is the parameters as they are."""
    return OuterState(
        map(parameters.flat, range(len(settings.fragments))),
        slots=settings.slots,
        with_error=settings.error_feedback is not None,
        offload=offload,
    )


def lack_of(uncounted: Mapping[int, str]) -> str:
    """A sentence on `Membership.uncounted_fragments`."""
    fragments = ", ".join(f"fragment {p} ({reason})" for p, reason in uncounted.items())
    return f"the outer parameters lack this replica's last work on {fragments}"


class Membership(ABC):
    """This replica among the others."""

    replica: Replica
    """θ, Θ and the counters."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""

    @property
    def answers(self) -> Answers | None:
        """The other replicas' answers; None where they are not known."""
        return None

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and no outer step has counted yet, on average over the fragments."""
        return 0.0

    @abstractmethod
    def initial_fragments(self) -> Sequence[int]:
        """The fragments whose Θ is the initial one, as far as this replica knows."""

    def uncounted_fragments(self) -> Mapping[int, str]:
        """The fragments with work that no outer step has counted, nor will count, and why, as far as is known."""
        return {}

    @abstractmethod
    def fail_together(self) -> AbstractContextManager[None]:
        """A context whose errors the other replicas hear of."""

    @abstractmethod
    def look(self) -> bool:
        """Look what an inner step brings, once after each; True if `advance` has something to do."""

    @abstractmethod
    def advance(self) -> tuple[OuterStep, ...]:
        """Send the fragments that are due, and merge those whose overlap has passed."""

    def take_loss(self, loss: float | Tensor) -> None:  # noqa: B027  only a log tells it
        """Take this replica's training loss in the inner step that is counted next."""

    def expect_next(self) -> None:  # noqa: B027  nobody knows where replicas come and go
        """Announce the fragment that is used next, if that is known."""

    @abstractmethod
    def finish(self, *, flush: bool, close: bool) -> tuple[OuterStep, ...]:
        """Merge what is in flight, and with `flush` send and merge every fragment once more.

        With `close` end the run, where a group of fixed replicas ends by itself.
        """

    @abstractmethod
    def reset_outer(self) -> None:
        """Take the model's parameters as Θ."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes."""

    @abstractmethod
    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state as `load` takes it, and the parameters unfrozen since; nothing is changed yet."""

    @abstractmethod
    def load(self, accepted: Mapping[str, Any]) -> None:
        """Take up a state."""


_MIN_BODY_BYTES = 64
"""Length of the shortest payload that is compared."""


class EqualGradients:
    """Notices two replicas whose outer gradients are equal in all fragments: independent training makes none.

    In one fragment they may be equal without that, where it has no gradients and the weights decay. Payloads too
    short to judge prove nothing, nor do those of zeros. With reduce_scatter a replica judges by its own shares.

    Args:
        num_fragments: P.
    """

    def __init__(self, num_fragments: int) -> None:
        self._pairs: list[Mapping[tuple[int, int], bool] | None] = [None] * num_fragments
        self._short: set[int] = set()

    def look(
        self,
        fragment: int,
        received: Mapping[int, Tensor],
        reduction: Reduction,
        num_elements: int,
        key: Key,
        cohort: Cohort,
    ) -> list[tuple[int, int]]:
        """The pairs of members whose newest outer gradients of all fragments are equal to the last bit.

        Args:
            fragment: the one that has come.
            received: a payload of every member.
            reduction: how the payloads were encoded.
            num_elements: N.
            key: of this replica's payloads.
            cohort: the members.
        """
        if received[key.replica].numel() < HEADER_BYTES + _MIN_BODY_BYTES:
            self._short.add(fragment)
        self._pairs[fragment] = pairs = {}
        for members in _equal(received):
            zeros_N = torch.zeros(num_elements, dtype=torch.float32, device=received[key.replica].device)
            of_zeros = reduction.addressed(reduction.encode(zeros_N, key, cohort), cohort)[key.replica]
            is_zero = torch.equal(of_zeros[HEADER_BYTES:], received[members[0]][HEADER_BYTES:])
            pairs |= dict.fromkeys(combinations(members, 2), is_zero)
        judged = [pairs for p, pairs in enumerate(self._pairs) if p not in self._short]
        return [
            pair
            for pair in pairs
            if all(each is not None and pair in each for each in judged)
            and not all(each[pair] for each in judged if each is not None)
        ]


def _equal(received: Mapping[int, Tensor]) -> list[list[int]]:
    """The groups of two and more members whose payloads have the same body."""
    groups: list[list[int]] = []
    for member, payload in sorted(received.items()):
        for group in groups:
            first = received[group[0]]
            if all(torch.equal(first[part], payload[part]) for part in (_BEGINNING, _BODY)):
                group.append(member)
                break
        else:
            groups.append([member])
    return [group for group in groups if len(group) > 1]


_BODY = slice(HEADER_BYTES, None)
_BEGINNING = slice(HEADER_BYTES, HEADER_BYTES + _MIN_BODY_BYTES)
"""Compared first: it differs nearly always."""
