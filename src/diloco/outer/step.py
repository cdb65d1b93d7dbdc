"""The outer step, in which Θ_p changes, and its merge into θ_{m,p}; and the record of one: times, norms, cosines.

On a CPU native.c makes both in one pass for Nesterov and mixing; otherwise the two rules change Θ_p and θ_{m,p}.

Shapes: N elements of one fragment, n of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.merge import MergeRule, Mixing, Past
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState, OuterRule
from diloco.schedule import Sync
from diloco.wire.kernels.memory import begin_to_host, elements_at_once, empty_like
from diloco.wire.kernels.native import OUTER_STEPS, Native, native


def take_outer_step(
    rule: OuterRule,
    merge_rule: MergeRule,
    fragment: FragmentState,
    parameters: Sequence[Tensor],
    average: Average,
    sync: Sync,
    cohort: Cohort,
    past: Past = Past(),  # noqa: B008  it is frozen
) -> None:
    """Θ_p ← OuterOpt(Θ_p, Δ_p), then θ_{m,p} ← merge(θ_{m,p}, Θ_p); the bits are the same either way.

    Args:
        rule: OuterOpt.
        merge_rule: the merge.
        fragment: Θ_p and the rule's own vectors, changed in place.
        parameters: θ_{m,p}, tensor by tensor, N elements together; changed in place.
        average: Δ_p.
        sync: fragment, round and step.
        cohort: the replicas whose outer gradients were averaged.
        past: what the merge rule reads besides Θ before the outer step.
    """
    if _is_nesterov(rule) and type(merge_rule) is Mixing and (fast := _native(parameters)) is not None:
        rule, average = rule.begin(fragment, sync, cohort), rule.averaged(fragment, average, cohort)
        scalars = (average.weight, rule.lr, rule.momentum, merge_rule.alpha, 1 - merge_rule.alpha)
        sizes = [theta.numel() for theta in parameters]
        vectors = fragment.use("outer"), fragment.use("velocity"), average.total_N
        for theta, *parts in zip(parameters, *(vector_N.split(sizes) for vector_N in vectors), strict=True):
            fast.outer_step([*parts, theta], scalars)
        # As torch's own operations do: a backward through values from before the merge must raise.
        torch.autograd.graph.increment_version(parameters)
        return
    if merge_rule.needs_previous:
        outer_N = fragment.use("outer")
        past = replace(past, outer_N=empty_like(outer_N).copy_(outer_N))
    rule.on_average(fragment, average, sync, cohort)
    merge_in_place(parameters, fragment.use("outer"), merge_rule, past)


def _is_nesterov(rule: OuterRule) -> TypeGuard[Nesterov]:
    """True unless a subclass computes something else than native.c."""
    if not isinstance(rule, Nesterov):
        return False
    return (type(rule).on_average, type(rule).step) == (Nesterov.on_average, Nesterov.step)


class _Shift(OuterRule):
    """Θ ← Θ − Δ, in the place of the run's own rule."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Move Θ."""
        fragment.use("outer").sub_(average.divided())


SHIFT = _Shift()
"""The outer step of a region's run that takes what an outer run has decided."""


def _native(parameters: Sequence[Tensor]) -> Native | None:
    """The compiled pass, if it reaches the memory of all parameters."""
    is_within_reach = all(
        theta.device.type == "cpu" and theta.dtype in OUTER_STEPS and theta.is_contiguous() for theta in parameters
    )
    return native() if is_within_reach else None


def merge_in_place(parameters: Sequence[Tensor], outer_N: Tensor, merge_rule: MergeRule, past: Past) -> None:
    """Merge Θ_p into θ_{m,p}, given tensor by tensor, in place; each is rounded to its dtype."""
    for group, part in _groups(parameters, elements_at_once(outer_N.device)):
        flat = [theta.reshape(-1) for theta in group]
        theta_n = (torch.cat(flat) if len(flat) > 1 else flat[0]).float()
        merged_n = merge_rule.merge(theta_n, outer_N[part], past.part(part))
        parts = merged_n.split([theta.numel() for theta in group])
        shaped = [part_n.view(theta.shape) for part_n, theta in zip(parts, group, strict=True)]
        torch._foreach_copy_(group, shaped)


def _groups(parameters: Sequence[Tensor], most: int) -> Iterator[tuple[list[Tensor], slice]]:
    """Neighbouring tensors of at most so many elements together, and their place in N.

    A larger tensor comes in pieces if its memory is contiguous; otherwise whole.
    """
    group: list[Tensor] = []
    start = size = 0
    for theta in parameters:
        in_pieces = theta.numel() > most and theta.is_contiguous()
        for piece in theta.view(-1).split(most) if in_pieces else (theta,):
            if group and size + piece.numel() > most:
                yield group, slice(start, start + size)
                group, start, size = [], start + size, 0
            group.append(piece)
            size += piece.numel()
    if group:
        yield group, slice(start, start + size)


@dataclass(frozen=True)
class Samples:
    """Elements at even distances of two vectors, FP32 (n), and N / n."""

    last_n: Tensor
    before_n: Tensor
    scale: float


def sampled(vector_N: Tensor, most: int = 1 << 14) -> Tensor:
    """A view of about so many elements, or all; their distance is odd, to meet all columns of a matrix."""
    return vector_N[:: vector_N.numel() // most | 1]


def products_of(samples: Samples | None, device: torch.device) -> Tensor:
    """⟨a, b⟩, ‖a‖² and ‖b‖² of two vectors, estimated from elements of them; zeros without any. FP32 (3)."""
    if samples is None:
        return torch.zeros(3, dtype=torch.float32, device=device)
    a_n, b_n = samples.last_n, samples.before_n
    pairs = (a_n, b_n), (a_n, a_n), (b_n, b_n)
    return torch.stack([torch.dot(*pair) for pair in pairs]) * samples.scale  # autocast rounds the inputs of @


def cosine_of(products: Tensor) -> float | None:
    """⟨a, b⟩ / (‖a‖ ‖b‖), from the three products, on the host; None if one of the vectors is zero."""
    dot, *squares = products.tolist()
    return dot / math.sqrt(squares[0]) / math.sqrt(squares[1]) if all(squares) else None


@dataclass(frozen=True)
class OuterStep:
    """One outer step of one fragment, as this replica took it; it holds the payloads as long as it is kept."""

    sync: Sync
    """Fragment, round, and the step after which it was sent."""
    blocked_seconds: float
    """Time in which this replica waited for the others' payloads."""
    make_average: Callable[[], Tensor]
    """Makes Δ_p again from what the replicas sent."""
    make_deltas: Callable[[], Iterator[Tensor]]
    """Makes the replicas' decoded outer gradients again, one after the other."""
    spans: Mapping[str, tuple[int, int]]
    """For each block of the fragment, its first element in these vectors, and the one after its last."""
    sum_over_shards: Callable[[Tensor], Tensor]
    """Adds up a value of every process of a sharded replica."""
    cohort: Cohort | None = None
    """The replicas that were in it, with their weights; None in a fixed group, where all are, with equal ones."""
    begin_work: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = lambda work: begin_to_host(work())
    """Begins work on the GPU, beside training; the function that is returned waits for its result."""
    samples: Samples | None = None
    """Elements of Δ_p and of the Δ_p before; None where this process has none."""
    gain_at: Callable[[float], float | None] | None = None
    """The outer rule's gain, given ρ; None for a rule that has no such number."""

    @cached_property
    def average(self) -> Tensor:
        """Δ_p, the average of the decoded outer gradients; flat FP32, made when it is first asked for."""
        return self.make_average()

    @cached_property
    def deltas(self) -> tuple[Tensor, ...]:
        """The decoded outer gradient of each replica, in replica order; flat FP32 of N elements.

        Decoded when they are first asked for; none with reduce_scatter, where no replica sees them whole.
        """
        return tuple(self.make_deltas())

    def begin(self, *, layer_cosine: bool) -> None:
        """Begin to compute norm and cosines, so that the host waits for nothing that a GPU is given to do later.

        Args:
            layer_cosine: those of the blocks, too.
        """
        _ = self._norm_and_products, self._cosine, layer_cosine and self.spans and self._block_cosines

    def norm(self) -> float:
        """‖Δ_p‖₂, over all shards; every process of a sharded replica must call it."""
        return self._norm_and_products()[0].sqrt().item()

    def successive_cosine(self) -> float | None:
        """ρ, the cosine of Δ_p and the Δ_p of the outer step before; None if this engine has not taken that one.

        Over all shards, as the norm is; of up to 16,384 elements per shard, so that no Δ_p is kept.
        """
        return cosine_of(self._norm_and_products()[1:])

    def gain(self) -> float | None:
        """The part of the outer step along Δ_p, in Δ_p, at this ρ; None if one of the two is not known."""
        rho = self.successive_cosine()
        return None if rho is None or self.gain_at is None else self.gain_at(rho)

    def mean_cosine(self, block: str | None = None) -> float | None:
        """Mean cosine over pairs of replicas, of the whole fragment or of one block; None if there is no pair.

        (‖Σ_m u_m‖² − Σ_m ‖u_m‖²) / (M (M − 1)) with u_m = Δ_m / ‖Δ_m‖, so that two vectors are in memory however
        many replicas there are. Over all shards: every process of a sharded replica must call it.
        """
        if block is None:
            (cosine,) = self._cosine().tolist() or (None,)
            return cosine
        cosines = self._block_cosines().tolist() or [None] * len(self.spans)
        return dict(zip(self.spans, cosines, strict=True))[block]

    @cached_property
    def _norm_and_products(self) -> Callable[[], Tensor]:
        def work() -> Tensor:
            # Not of `average`, which others may read on the stream of training.
            square = self.make_average().square().sum()
            return self.sum_over_shards(torch.cat([square[None], products_of(self.samples, square.device)]))

        return self.begin_work(work)

    @cached_property
    def _cosine(self) -> Callable[[], Tensor]:
        return self.begin_work(lambda: self._mean_cosines([slice(None)]))

    @cached_property
    def _block_cosines(self) -> Callable[[], Tensor]:
        return self.begin_work(lambda: self._mean_cosines([slice(*span) for span in self.spans.values()]))

    def _mean_cosines(self, parts: Sequence[slice]) -> Tensor:
        """The mean cosine in each part of the vectors, in two passes over the replicas; none without a pair."""
        squares = [torch.stack([delta_N[p].square().sum() for p in parts]) for delta_N in self.make_deltas()]
        if len(squares) < 2:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        norms_MxP = self.sum_over_shards(torch.stack(squares)).sqrt()
        sums = [torch.zeros((), dtype=torch.float32, device="cpu") for _ in parts]
        for delta_N, norms_P in zip(self.make_deltas(), norms_MxP.clamp(min=1e-30), strict=True):
            sums = [sum_N + delta_N[p] / norm for sum_N, p, norm in zip(sums, parts, norms_P, strict=True)]
        all_pairs_P = self.sum_over_shards(torch.stack([sum_N.square().sum() for sum_N in sums]))
        num_pairs = len(squares) * (len(squares) - 1)
        return (all_pairs_P - norms_MxP.count_nonzero(0)) / num_pairs
