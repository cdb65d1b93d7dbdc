"""One outer step and its merge, in place.

Where native.c has it, in one pass over memory; elsewhere in a few operations, however many tensors there are.

Shapes: N elements of one fragment, n of one parameter.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco.kernels.memory import elements_at_once
from diloco.kernels.native import OUTER_STEPS, Native, native
from diloco.outer.mixing import MergeRule, Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState, OuterRule
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average
from diloco.schedule import Sync


def take_outer_step(
    rule: OuterRule,
    merge_rule: MergeRule,
    fragment: FragmentState,
    parameters: Sequence[Tensor],
    average: Average,
    sync: Sync,
    cohort: Cohort,
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
    """
    # A subclass may compute something else than native.c.
    if type(rule) is Nesterov and type(merge_rule) is Mixing and (fast := _native(parameters)) is not None:
        scalars = (average.weight, rule.lr, rule.momentum, merge_rule.alpha, 1 - merge_rule.alpha)
        sizes = [theta.numel() for theta in parameters]
        vectors = fragment.use("outer"), fragment.use("velocity"), average.total_N
        for theta, *parts in zip(parameters, *(vector_N.split(sizes) for vector_N in vectors), strict=True):
            fast.outer_step([*parts, theta], scalars)
        # As torch's own operations do: a backward through values from before the merge must raise.
        torch.autograd.graph.increment_version(parameters)
        return
    previous_N = fragment.use("outer").clone() if merge_rule.needs_previous else None
    rule.on_average(fragment, average, sync, cohort)
    merge_in_place(parameters, fragment.use("outer"), merge_rule, previous_N)


def _native(parameters: Sequence[Tensor]) -> Native | None:
    """The compiled pass, if it reaches the memory of all parameters."""
    is_within_reach = all(
        theta.device.type == "cpu" and theta.dtype in OUTER_STEPS and theta.is_contiguous() for theta in parameters
    )
    return native() if is_within_reach else None


def merge_in_place(
    parameters: Sequence[Tensor], outer_N: Tensor, merge_rule: MergeRule, previous_N: Tensor | None
) -> None:
    """Merge Θ_p into θ_{m,p}, given tensor by tensor, in place; each is rounded to its dtype."""
    for group, part in _groups(parameters, elements_at_once(outer_N.device)):
        flat = [theta.reshape(-1) for theta in group]
        theta_n = (torch.cat(flat) if len(flat) > 1 else flat[0]).float()
        merged_n = merge_rule.merge(theta_n, outer_N[part], None if previous_N is None else previous_N[part])
        parts = merged_n.split([theta.numel() for theta in group])
        shaped = [part_n.view(theta.shape) for part_n, theta in zip(parts, group, strict=True)]
        torch._foreach_copy_(group, shaped)


def _groups(parameters: Sequence[Tensor], most: int) -> Iterator[tuple[list[Tensor], slice]]:
    """Neighbouring tensors of at most so many elements together, or one larger tensor; and their place in N."""
    group: list[Tensor] = []
    start = size = 0
    for theta in parameters:
        if group and size + theta.numel() > most:
            yield group, slice(start, start + size)
            group, start, size = [], start + size, 0
        group.append(theta)
        size += theta.numel()
    if group:
        yield group, slice(start, start + size)
