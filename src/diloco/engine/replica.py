"""A replica's own side of the rounds: θ, Θ, its outer gradients, outer steps and merges.

Shapes: N elements of one fragment that this process holds.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.engine.guards import Verdict, undone
from diloco.engine.lanes import DeviceLane, SameLane
from diloco.engine.outer_state import ERROR, OUTER, OuterState
from diloco.engine.parameters import FragmentParameters
from diloco.engine.settings import Settings
from diloco.engine.shards import shard_index, sum_over_shards
from diloco.errors import NonFiniteError, UserError
from diloco.exchange.process_group import Answers
from diloco.outer.averages import Average, Reduction
from diloco.outer.cohort import Cohort
from diloco.outer.digest import outer_digest_there
from diloco.outer.feedback import encode_with_feedback
from diloco.outer.merge import MergeRule
from diloco.outer.rule import FragmentState
from diloco.outer.step import OuterStep, take_outer_step
from diloco.schedule import Sync
from diloco.wire.kernels.memory import begin_to_host, empty
from diloco.wire.payload import MOST_NOTES, Codec, Key, Unsealed


@dataclass(eq=False, kw_only=True)
class Encoded:
    """The payloads of a fragment's outer gradient; on a GPU they may still be on their way to the host."""

    step: int
    """The inner step after which it is sent."""
    unsealed: Unsealed
    """The codec that wrote the payloads."""
    reduction: Reduction
    """The reduction with that codec."""
    payloads: tuple[Tensor, ...]
    """The payloads on the device, without headers."""
    error_N: Tensor | None
    """The error of error feedback that the payloads leave."""
    host_payloads: tuple[Tensor, ...]
    """The payloads where they are sent from."""
    base: int | None
    """The digest of Θ; None where it travels with the payloads."""
    verdicts: Sequence[Verdict]
    """Verdicts on earlier merges, which travel with the payloads."""
    wait: Callable[[], None]
    """Waits for the device; then the host may read the payloads."""

    def own(self, num_elements: int, key: Key) -> Tensor:
        """The outer gradient as the other replicas will decode it, flat FP32 (N)."""
        return self.reduction.decode(self.payloads, num_elements, key)

    def sealed(self) -> tuple[Tensor, ...]:
        """The payloads as they are sent; called once, by any thread.

        Raises:
            NonFiniteError: if the outer gradient, with what error feedback adds, is not finite.
            UserError: if a merge of before was undone.
        """
        self.wait()
        notes = self.unsealed.read_notes(self.host_payloads[0])
        for verdict, is_undone in zip(self.verdicts, notes, strict=True):
            if is_undone:
                raise undone(verdict, f"step {self.step}: ")
        self.unsealed.seal_all(self.host_payloads, base=self.base)
        return self.host_payloads


def together(payloads: Sequence[Tensor], to_host: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
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
    _sample_N: Tensor | None = None
    _key: Key | None = None

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Time the work in this context as encoding."""
        start = time.perf_counter()
        yield
        self.encode_seconds += time.perf_counter() - start

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Time the work in this context as merging."""
        start = time.perf_counter()
        yield
        self.merge_seconds += time.perf_counter() - start

    def sample(self, delta_N: Tensor, key: Key) -> None:
        """Keep the first elements of an outer gradient, so that the codec's error can be measured later."""
        self._sample_N, self._key = delta_N[:_SAMPLED].clone(), key

    def received(self, num_bytes: int, seconds: float, blocked_seconds: float) -> None:
        """Note an exchange of so many bytes in each direction, and how long training waited for its end."""
        if num_bytes:
            self.exchange_mbit_s = num_bytes * 8e-6 / seconds
            self.was_waited_for = blocked_seconds > max(_NO_WAIT_SECONDS, _NO_WAIT_SHARE * seconds)

    def codec_errors(self, wire: Codec) -> tuple[Tensor, Tensor] | None:
        """‖Δ − decode(encode(Δ))‖² and ‖Δ‖² of the sample, on its device; None before the first sync."""
        if self._sample_N is None or self._key is None:
            return None
        unsealed = Unsealed(wire)
        payload = unsealed.encode(self._sample_N, self._key)
        error_N = unsealed.decode(payload, self._sample_N.numel(), self._key) - self._sample_N
        return error_N.square().sum(), self._sample_N.square().sum()


_SAMPLED = 1 << 14


_NO_WAIT_SECONDS = 1e-3


_NO_WAIT_SHARE = 0.05  # of an exchange's time: less may be the scheduler's delay, not the network's


def outer_step(
    reduction: Reduction,
    payloads: dict[int, Tensor],
    sync: Sync,
    key: Key,
    cohort: Cohort,
    *,
    like_N: Tensor,
    blocked_seconds: float,
    spans: Mapping[str, tuple[int, int]],
    shard_group: dist.ProcessGroup | None,
    lane: DeviceLane,
) -> OuterStep:
    """An outer step that makes averages and outer gradients again when they are asked for.

    Args:
        reduction: how the payloads were averaged.
        payloads: of the last phase, by member.
        sync: fragment, round and step.
        key: of this replica's payloads.
        cohort: whose outer gradients were averaged.
        like_N: a vector of the fragment's length, on its device; not kept, since it may be reused.
        blocked_seconds: how long training waited for the payloads.
        spans: where the fragment's blocks lie.
        shard_group: the processes that hold the replica's shards.
        lane: where norms and cosines are computed.
    """
    num_elements, device = like_N.numel(), like_N.device

    def average() -> Tensor:
        to_N = torch.empty(num_elements, dtype=torch.float32, device=device)
        return reduction.average(payloads, to_N, key, cohort).divided()

    deltas = partial(reduction.each, payloads, num_elements, key, device)
    step = described(sync, blocked_seconds, average, deltas, spans, shard_group)
    # The payloads have come: nothing waits for training.
    return replace(step, begin_work=lambda work: lane.queue(lambda: begin_to_host(work()), after_training=False))


def described(
    sync: Sync,
    blocked_seconds: float,
    make_average: Callable[[], Tensor],
    make_deltas: Callable[[], Iterator[Tensor]],
    spans: Mapping[str, tuple[int, int]],
    shard_group: dist.ProcessGroup | None,
    cohort: Cohort | None = None,
) -> OuterStep:
    """An outer step, from what makes its vectors again; see `OuterStep`."""
    add_up = partial(sum_over_shards, group=shard_group)
    return OuterStep(sync, blocked_seconds, make_average, make_deltas, spans, add_up, cohort)


def non_finite(step: int, replica: int, fragment: int, parameter: str | None) -> NonFiniteError:
    """The error for an outer gradient that is not finite; `parameter` is None if error feedback made it so."""
    where = f"step {step}: the outer gradient of {parameter or 'some parameter'}"
    reason = "is not finite" if parameter else "is finite, but not with what error feedback adds"
    return NonFiniteError(
        f"{where} (replica {replica}, fragment {fragment}) {reason}; nothing was sent: lower the learning rate"
    )


@dataclass(eq=False)
class ReplicaRounds:
    """The state that rounds change on this replica, and the counters; a subclass knows the other replicas."""

    settings: Settings
    parameters: FragmentParameters
    """θ."""
    state: OuterState
    """Θ, the slots of the outer rule, and the error."""
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
    last_sent: list[int] = field(default_factory=list)
    """For each fragment the step after which it was sent last; 0 if never."""
    record: Record = field(default_factory=Record)
    """Measurements of the syncs, for logs."""
    lane: DeviceLane = field(default_factory=SameLane)
    """The place where outer gradients are encoded, decoded and merged."""

    def __post_init__(self) -> None:
        """Make the memory in which sums are made."""
        sizes = [self.state.num_elements(p) for p in range(self.state.num_fragments)]
        self.last_sent = [0] * len(sizes)
        self._reduction = self.settings.reduction
        self._shard_group = self.parameters.shard_group
        self._shard = shard_index(self._shard_group)
        self._scratch = empty(max(sizes), torch.float32, self.parameters.device)

    @property
    def replica(self) -> int:
        """This replica's number."""
        raise NotImplementedError

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet; 0 in a fixed group."""
        return 0.0

    @property
    def answers(self) -> Answers | None:
        """The other replicas' answers; None where they are not known."""
        return None

    def is_initial(self, p: int) -> bool:
        """Whether Θ_p is the initial one, as far as this replica's sends say."""
        return not self.last_sent[p]

    def has_uncounted(self, p: int) -> bool:
        """Whether a fragment has work that no payload on the way tells; a fixed group counts all payloads."""
        return False

    def expect_next(self) -> None:
        """Announce the fragment that is used next, if that is known."""

    def all_shards_or_none(self) -> AbstractContextManager[None]:
        """A context that fails in all shards of this replica if it fails in one."""
        return self.parameters.all_or_none(f"step {self.num_steps}: another shard of replica {self.replica}")

    def check_parameters(self, fragments: Iterable[int]) -> None:
        """Refuse parameters that are no longer those of the model, or did not keep a merge.

        Raises:
            UserError: naming step and parameter.
        """
        try:
            self.parameters.check_still_the_models(fragments)
        except UserError as error:
            raise UserError(f"step {self.num_steps}: {error}") from None

    def encode(self, p: int, key: Key, cohort: Cohort, *, base: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The payloads of a fragment's outer gradient, and the error that they leave.

        Raises:
            NonFiniteError: naming the parameter.
        """
        encoded = self.begin_encoding(p, key, cohort, base=base)
        with self.naming_non_finite(p, self.num_steps):
            return encoded.sealed(), encoded.error_N

    def begin_encoding(self, p: int, key: Key, cohort: Cohort, *, base: int | None) -> Encoded:
        """Encode a fragment's outer gradient on the lane.

        Args:
            p: the fragment.
            key: whose outer gradient it is.
            cohort: the members that share the fragment.
            base: the digest of Θ_p, 0 where nobody compares it; None to compute it.
        """
        beta, state = self.settings.error_feedback, self.state
        self.lane.join()  # it has ended with the working memory
        outer_N = state.use(OUTER, p)
        delta_N = self.parameters.outer_gradient(p, outer_N, self._scratch[: outer_N.numel()])
        self.record.sample(delta_N, key)
        verdicts = self.parameters.watch.take(MOST_NOTES)
        notes = tuple(verdict.is_undone for verdict in verdicts)
        if base is None and not self.lane.is_apart:
            base = self.state.digest(p)

        def work() -> Encoded:
            there = outer_digest_there(state.use(OUTER, p)) if base is None else None
            unsealed = Unsealed(self.settings.wire, notes, there)
            reduction: Reduction = replace(cast(Any, self._reduction), wire=unsealed)
            if beta is None:
                payloads, error_N = reduction.encode(delta_N, key, cohort), None
            else:
                payloads, error_N = encode_with_feedback(
                    reduction, delta_N, state.use(ERROR, p), beta, key, cohort
                )
            return Encoded(
                step=self.num_steps,
                unsealed=unsealed,
                reduction=reduction,
                payloads=payloads,
                error_N=error_N,
                host_payloads=together(payloads, self.lane.to_host),
                base=base,
                verdicts=verdicts,
                wait=self.lane.mark(),
            )

        return self.lane.queue(work)

    @contextmanager
    def naming_non_finite(self, p: int, step: int) -> Iterator[None]:
        """Name the parameter if an outer gradient, taken after a step, was not finite: θ is as bad since then."""
        try:
            yield
        except NonFiniteError:
            self.lane.join()
            outer_N = self.state.use(OUTER, p)
            delta_N = self.parameters.outer_gradient(p, outer_N, self._scratch[: outer_N.numel()])
            name = self.parameters.first_not_finite(p, delta_N)
            raise non_finite(step, self.replica, p, name) from None

    def on_send(self, sync: Sync, own: Callable[[], Tensor]) -> None:
        """Let the outer rule act on a fragment that is sent; `own` decodes its outer gradient."""
        with self._fragment(sync.fragment) as fragment:
            self.settings.outer.on_send(fragment, own, sync)

    def keep_error(self, p: int, error_N: Tensor) -> None:
        """Take the error that a payload leaves."""
        self.state.use(ERROR, p).copy_(error_N)
        self.keep(ERROR, p)

    def keep(self, kind: str, p: int) -> None:
        """Take home a vector that was changed."""
        self.state.keep(kind, p)

    def take(self, sync: Sync, average: Average, cohort: Cohort, mixing: MergeRule) -> None:
        """Take an outer step of a fragment, and merge it."""
        p = sync.fragment
        with (
            self.record.merging(),
            self.parameters.merging(p, self.num_steps) as theta,
            self._fragment(p) as fragment,
        ):
            rule = self.settings.outer
            self.lane.queue(lambda: take_outer_step(rule, mixing, fragment, theta, average, sync, cohort))
            self.lane.join()

    @contextmanager
    def _fragment(self, p: int) -> Iterator[FragmentState]:
        """A fragment's state for the outer rule; the vectors that the rule used are kept."""
        used: dict[str, None] = {}

        def use(kind: str) -> Tensor:
            used[kind] = None
            return self.state.use(kind, p)

        yield FragmentState(use)
        for kind in used:
            self.keep(kind, p)


def outer_state(settings: Settings, parameters: FragmentParameters, *, offload: bool) -> OuterState:
    """The state before the first round: Θ is the parameters as they are."""
    return OuterState(
        map(parameters.flat, range(len(settings.fragments))),
        slots=settings.outer.slots,
        with_error=settings.error_feedback is not None,
        offload=offload,
    )


class Membership(Protocol):
    """This replica among the others."""

    @property
    def rounds(self) -> ReplicaRounds:
        """θ, Θ and the counters."""
        ...

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        ...

    def failing_together(self) -> AbstractContextManager[None]:
        """A context whose errors the other replicas hear of."""
        ...

    def is_due(self) -> bool:
        """Whether `advance` has something to do after the inner step that was just counted."""
        ...

    def advance(self) -> tuple[OuterStep, ...]:
        """Send the fragments that are due, and merge those whose overlap has passed."""
        ...

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Merge what is in flight, and with `flush` send and merge every fragment once more."""
        ...

    def adopt(self) -> None:
        """Take the model's parameters as Θ."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes."""
        ...

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state as `load` takes it, and the parameters unfrozen since; nothing is changed yet."""
        ...

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Take up a state."""
        ...
