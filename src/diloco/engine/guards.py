"""Guards against results that are wrong without an error: equal outer gradients, and merges that are undone.

Shapes: N elements of one fragment, K sampled ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.outer.averages import Reduction
from diloco.outer.cohort import Cohort
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.kernels.memory import begin_to_host
from diloco.wire.payload import Key

_MIN_BODY_BYTES = 64
"""Length of the shortest payload that is compared."""
_MIN_ELEMENTS = 16
"""Fewest elements that are judged: fewer may return to where they were by chance."""


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


@dataclass
class _Merge:
    """A merge to judge."""

    step: int
    """The inner step after which the merge was."""
    resolution: float
    """Smallest move, relative to the parameter, that is no rounding."""
    samples: list[Tensor]
    """The fragment's samples before and after the merge, and after each of the next two inner steps."""


class MergeWatch:
    """Notices an optimizer that overwrites merged parameters with weights of its own, which saw no merge.

    With b before and a after a merge, c after the next inner step and d after the one that follows, an inner step
    is about s = ‖d − c‖ long. An optimizer that started from a has gone ‖c − a‖ ≈ s, one that started beside b
    ‖c − b‖ ≈ s. The merge counts as undone if ‖c − a‖ > 3 s, s / 3 < ‖c − b‖ < 10 s, and c is three times
    nearer to b than to a, also in 85 % of the elements. K elements of a fragment are looked at, and of those the
    half that the merge moved the most, each by more than the rounding of its dtype. Where these are few, or the
    merge is no longer than three inner steps, nothing is concluded.
    """

    def __init__(self) -> None:
        self.merges: dict[int, _Merge] = {}
        """The merges to look at after the next two inner steps, by fragment."""
        self._verdicts: list[tuple[int, int, Callable[[], Tensor]]] = []
        """Fragment and step of each merge that was judged, and a function that reads whether it was undone."""

    def merged(self, fragment: int, step: int, before_K: Tensor, shards: Sequence[Tensor]) -> None:
        """Remember a merge, from the sample before it and this process's shards after it."""
        if before_K.numel() >= 2 * _MIN_ELEMENTS:
            resolution = 8 * max(torch.finfo(shard.dtype).eps for shard in shards)
            self.merges[fragment] = _Merge(step, resolution, [before_K, sample(shards)])

    def look(self, fragment: int, step: int, shards: Sequence[Tensor]) -> None:
        """Look at a fragment after an inner step; the device need not be waited for."""
        merge = self.merges[fragment]
        if step != merge.step + len(merge.samples) - 1:  # another state was loaded
            del self.merges[fragment]
            return
        merge.samples.append(sample(shards))
        if len(merge.samples) == 4:
            verdict = begin_to_host(_undone(merge.samples, merge.resolution))
            self._verdicts.append((fragment, merge.step, verdict))
            del self.merges[fragment]

    def take(self, step: int) -> Callable[[], None]:
        """A function that refuses to go on after an inner step if a merge that was judged so far was undone.

        It waits for what a GPU has to do until then, and may be called by any thread.

        Raises:
            UserError: by that function, naming the fragment and the step of the merge.
        """
        verdicts, self._verdicts = self._verdicts, []

        def check() -> None:
            for fragment, merged, is_undone in verdicts:
                if is_undone():
                    raise UserError(
                        f"step {step}: the merge of fragment {fragment} after step {merged} was undone by the "
                        "next inner step: the optimizer keeps weights of its own and overwrote the merged "
                        "parameters with them: give them to the engine as masters=, a tensor by parameter name or "
                        "an adapter of diloco.integrations",
                        "masters",
                    )

        return check


def sample(shards: Sequence[Tensor]) -> Tensor:
    """A copy of at most 64 elements, FP32 (K), spread over the four largest of the shards."""
    largest = sorted(shards, key=Tensor.numel)[-4:]
    strides = [max(1, -(-shard.numel() // 16)) for shard in largest]
    parts = [shard.reshape(-1)[::stride].float() for shard, stride in zip(largest, strides, strict=True)]
    return torch.cat(parts)


def _undone(samples: Sequence[Tensor], resolution: float) -> Tensor:
    """A bool on the samples' device: True if the inner step after a merge began where the merge had begun."""
    before_K, after_K, next_K, last_K = samples
    size_K = (after_K - before_K).abs()
    is_large_K = (size_K >= size_K.median()) & (size_K > resolution * before_K.abs())
    from_before_K, from_after_K, step_K = (
        (end_K - start_K) * is_large_K
        for start_K, end_K in ((before_K, next_K), (after_K, next_K), (next_K, last_K))
    )
    from_before, from_after, step = (torch.linalg.vector_norm(v) for v in (from_before_K, from_after_K, step_K))
    is_nearer_K = is_large_K & (from_before_K.abs() < from_after_K.abs())
    num_large, num_nearer = is_large_K.sum(), is_nearer_K.sum()
    return (
        (num_large >= _MIN_ELEMENTS)
        & (num_nearer >= 0.85 * num_large)
        & (3 * from_before < from_after)
        & (3 * step < from_after)
        & (3 * from_before > step)
        & (from_before < 10 * step)
    )
