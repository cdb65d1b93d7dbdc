"""The contract of an outer rule: from the average of the outer gradients to new outer parameters.

Shapes: N elements of one fragment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from diloco.outer.mixing import MergeRule
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average
from diloco.schedule import Sync

JSON: TypeAlias = "str | float | bool | list[JSON] | dict[str, JSON] | None"


class Part(NamedTuple):
    """The part of a fragment that belongs to one parameter: views of n elements."""

    outer_n: Tensor
    """Θ, flat FP32."""
    slots: tuple[Tensor, ...]
    """The rule's own vectors, in the order of its `slots`; flat FP32."""
    total_n: Tensor
    """Σ_m w_m Δ_m, flat FP32."""
    theta: Tensor
    """θ, the replica's own parameter, in its own shape and dtype."""


@dataclass(frozen=True)
class FragmentState:
    """One fragment's outer state and this replica's own parameters; a rule changes both in place."""

    use: Callable[[str], Tensor]
    """Fetches a vector of the fragment, flat FP32 (N): Θ_p by the name `outer`, the rule's own by their slots."""
    slots: tuple[str, ...]
    """The names of the rule's own vectors, which are zero at the start."""
    parameters: Sequence[Tensor]
    """θ_{m,p}, tensor by tensor, N elements together."""
    merge_rule: MergeRule
    """How Θ enters θ."""

    def parts(self, total_N: Tensor) -> Iterator[Part]:
        """The fragment parameter by parameter, with the part of an average's total."""
        sizes = [theta.numel() for theta in self.parameters]
        vectors = (self.use("outer"), total_N, *map(self.use, self.slots))
        for theta, outer_n, total_n, *slots in zip(
            self.parameters, *(vector_N.split(sizes) for vector_N in vectors), strict=True
        ):
            yield Part(outer_n, tuple(slots), total_n, theta)

    def merge(self) -> None:
        """Merge Θ_p into θ_{m,p}, rounded to its dtype."""
        sizes = [theta.numel() for theta in self.parameters]
        for theta, outer_n in zip(self.parameters, self.use("outer").split(sizes), strict=True):
            merge_part(theta, outer_n, self.merge_rule)


def merge_part(theta: Tensor, outer_n: Tensor, merge_rule: MergeRule) -> None:
    """Merge Θ into one parameter, rounded to its dtype."""
    theta.copy_(merge_rule.merge(theta.reshape(-1).float(), outer_n).view(theta.shape))


class OuterRule(Protocol):
    """An outer optimizer; it holds settings only, and the engine keeps its vectors."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the FP32 vectors that it keeps beside Θ, zero at the start, such as ("velocity",)."""
        ...

    @property
    def shared(self) -> bool:
        """True if Θ has the same bits on every replica after a round."""
        ...

    def facts(self) -> Mapping[str, JSON]:
        """The settings that all replicas must share, by name."""
        ...

    def on_send(self, fragment: FragmentState, own: Callable[[], Tensor], sync: Sync) -> None:
        """Act on a fragment that this replica has just sent.

        Args:
            fragment: its state.
            own: makes this replica's own outer gradient as the others will decode it, flat FP32 (N).
            sync: fragment, round and step.
        """
        ...

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Update Θ and the slots from Δ, then merge Θ into θ, in place.

        Args:
            fragment: its state; `fragment.merge()` is the merge.
            average: Δ_p; the memory of its total may be overwritten.
            sync: fragment, round and step.
            cohort: the replicas whose outer gradients were averaged.
        """
        ...
