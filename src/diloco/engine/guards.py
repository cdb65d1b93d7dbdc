"""Guards against results that are wrong without an error: equal outer gradients, and merges that are undone.

Shapes: N elements of one fragment, K sampled ones.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.reduction import Reduction
from diloco.reduction.cohort import Cohort
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.payload import Key

_MIN_BODY_BYTES = 64
"""Shorter payloads may be equal by chance."""
_MIN_ELEMENTS = 16
"""Fewer elements may return to where they were by chance."""


def refuse_equal_payloads(
    received: Mapping[int, Tensor], reduction: Reduction, num_elements: int, key: Key, cohort: Cohort
) -> None:
    """Refuse outer gradients that are equal on all replicas: independent training never makes them.

    Args:
        received: the first phase's payload of every member.
        reduction: how the payloads were encoded.
        num_elements: N.
        key: of this replica's payloads.
        cohort: the members.

    Raises:
        UserError: if all payloads are equal to the last bit, and not those of an outer gradient of zeros.
    """
    own = received[key.replica]
    others = [payload for member, payload in received.items() if member != key.replica]
    if not others or own.numel() < HEADER_BYTES + _MIN_BODY_BYTES:
        return
    if not all(torch.equal(payload.to(own.device), own) for payload in others):
        return
    zeros_N = torch.zeros(num_elements, device=own.device)
    of_zeros = reduction.addressed(reduction.encode(zeros_N, key, cohort), cohort)[key.replica]
    if not torch.equal(of_zeros, own):
        raise UserError(
            f"all {len(cohort.members)} replicas made the same outer gradient of fragment {key.fragment}, to the "
            "last bit: either gradients are averaged across replicas, by DDP or another user of a process group "
            "that spans them (make each replica a job of its own, joined by diloco.connect, or give it a group of "
            "its own), or all replicas train on the same data (give each a share of its own)"
        )


class MergeWatch:
    """Notices an optimizer that overwrites merged parameters with weights of its own, which saw no merge.

    With b before and a after a merge, and c after the next inner step, c − b is that step alone if it started from
    weights beside b. The merge counts as undone if ‖c − b‖ < ‖a − b‖ / 3, and c is nearer to b than to a in 85 %
    of the elements: a step that started from a would have to take back the merge by itself. Only K elements of a
    fragment are looked at, and of those the half that the merge moved the most, each by more than the rounding of
    its dtype. Where these are few, or inner steps as long as the merge, nothing is concluded.
    """

    def __init__(self) -> None:
        self.merges: dict[int, tuple[int, Tensor, Tensor, float]] = {}
        """The merges to look at after the next inner step, by fragment."""
        self._undone: list[tuple[int, int, Tensor]] = []

    def merged(self, fragment: int, step: int, before_K: Tensor, shards: Sequence[Tensor]) -> None:
        """Remember a merge, from the sample before it and this process's shards after it."""
        if before_K.numel() >= 2 * _MIN_ELEMENTS:
            resolution = 8 * max(torch.finfo(shard.dtype).eps for shard in shards)
            self.merges[fragment] = step, before_K, sample(shards), resolution

    def look(self, fragment: int, step: int, shards: Sequence[Tensor]) -> None:
        """Judge a merge after the inner step that followed it; the device need not be waited for."""
        merged_step, before_K, after_K, resolution = self.merges.pop(fragment)
        if step == merged_step + 1:  # not where another state was loaded
            undone = _undone(before_K, after_K, sample(shards), resolution)
            self._undone.append((fragment, merged_step, undone))

    def check(self) -> None:
        """Refuse to go on if a merge was undone.

        Raises:
            UserError: naming the fragment and the step.
        """
        verdicts, self._undone = self._undone, []
        for fragment, step, undone in verdicts:
            if undone:
                raise UserError(
                    f"the merge of fragment {fragment} after step {step} was undone by the next inner step: the "
                    "optimizer keeps weights of its own and overwrote the merged parameters with them: give them "
                    "to the engine as masters=, a tensor by parameter name or an adapter of diloco.integrations",
                    "masters",
                )


def sample(shards: Sequence[Tensor]) -> Tensor:
    """A copy of at most 64 elements, FP32 (K), spread over the four largest of the shards."""
    largest = sorted(shards, key=Tensor.numel)[-4:]
    strides = [max(1, -(-shard.numel() // 16)) for shard in largest]
    parts = [shard.reshape(-1)[::stride].float() for shard, stride in zip(largest, strides, strict=True)]
    return torch.cat(parts)


def _undone(before_K: Tensor, after_K: Tensor, now_K: Tensor, resolution: float) -> Tensor:
    """A bool on the samples' device: True if next to nothing is left of the merge, nearly everywhere."""
    merge_K, since_K = after_K - before_K, now_K - before_K
    size_K = merge_K.abs()
    is_large_K = (size_K >= size_K.median()) & (size_K > resolution * before_K.abs())
    is_nearer_K = since_K.abs() < (now_K - after_K).abs()
    is_short = 9 * (since_K.square() * is_large_K).sum() < (merge_K.square() * is_large_K).sum()
    num_large, num_nearer = is_large_K.sum(), (is_large_K & is_nearer_K).sum()
    return (num_large >= _MIN_ELEMENTS) & (num_nearer >= 0.85 * num_large) & is_short
