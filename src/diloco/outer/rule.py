"""The contract of an outer rule: from the average of the outer gradients to new outer parameters.

Shapes: N elements of one fragment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.schedule import Sync

RULE = "outer rule's "
"""The beginning of the names of a rule's facts among those of an engine."""
JSON: TypeAlias = "str | float | bool | list[JSON] | dict[str, JSON] | None"


@dataclass(frozen=True)
class FragmentState:
    """One fragment's outer state, which a rule changes in place."""

    use: Callable[[str], Tensor]
    """Fetches a vector of the fragment, flat FP32 (N): Θ_p by the name `outer`, the rule's own by their slots."""


class OuterRule(Protocol):
    """The outer step; it holds settings only, and the engine keeps its vectors."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the FP32 vectors that it keeps beside Θ, zero at the start, such as ("velocity",)."""
        ...

    @property
    def shared(self) -> bool:
        """True if Θ and the slots have the same bits on every replica after a round."""
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
        """Update Θ and the slots from Δ, in place; the engine merges Θ into θ after that.

        Args:
            fragment: its state.
            average: Δ_p; the memory of its total may be overwritten.
            sync: fragment, round and step.
            cohort: the replicas whose outer gradients were averaged.
        """
        ...
