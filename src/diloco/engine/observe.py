"""Reports about rounds: outer steps for logs, and errors with the parameter at fault.

Shapes: N elements of one fragment that this process holds.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.engine.sharded import sum_over_shards
from diloco.errors import NonFiniteError
from diloco.outer.step import OuterStep
from diloco.reduction import Reduction
from diloco.reduction.cohort import Cohort
from diloco.schedule import Sync
from diloco.wire.payload import Key


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
    """
    num_elements, device = like_N.numel(), like_N.device

    def average() -> Tensor:
        to_N = torch.empty(num_elements, dtype=torch.float32, device=device)
        return reduction.average(payloads, to_N, key, cohort).divided()

    deltas = partial(reduction.each, payloads, num_elements, key, device)
    add_up = partial(sum_over_shards, group=shard_group)
    return OuterStep(sync, blocked_seconds, average, deltas, spans, add_up)


def non_finite(step: int, replica: int, fragment: int, parameter: str | None) -> NonFiniteError:
    """The error for an outer gradient that is not finite; `parameter` is None if error feedback made it so."""
    where = f"step {step}: the outer gradient of {parameter or 'some parameter'}"
    what = "is not finite" if parameter else "is finite, but not with what error feedback adds"
    return NonFiniteError(
        f"{where} (replica {replica}, fragment {fragment}) {what}; nothing was sent: lower the learning rate"
    )
