"""The contract of an outer rule: from the average of the outer gradients to new outer parameters.

Shapes: N elements of one fragment.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor

from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.schedule import Sync

RULE = "outer rule's "
"""The beginning of the names of a rule's facts among those of an engine."""
JSON: TypeAlias = "str | float | bool | list[JSON] | dict[str, JSON] | None"


@dataclass(frozen=True)
class Span:
    """A parameter, or this process's part of it, in the flat vector of its fragment."""

    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """The end of its elements."""
        return self.start + math.prod(self.shape)

    def of(self, flat_N: Tensor) -> Tensor:
        """The parameter's elements of a flat vector (N): a view, flat, too."""
        return flat_N[self.start : self.stop]


@dataclass(frozen=True)
class FragmentState:
    """One fragment's outer state, which a rule changes in place."""

    use: Callable[[str], Tensor]
    """Fetches a vector of the fragment, flat FP32 (N): Θ_p by the name `outer`, the rule's own by their slots."""
    spans: Mapping[str, Span] = field(default_factory=dict)
    """The place of each parameter in these vectors, by its name, in their order."""
    sum_over_shards: Callable[[Tensor], Tensor] = lambda values: values
    """Adds up values of every process of a sharded replica, such as squares of the parts of one parameter; all of
    them call it together. Of sums in FP64 that are rounded to FP32, not one in a million depends on the shards."""


class OuterRule(ABC):
    """The outer step; it holds settings only, and the engine keeps its vectors.

    For a rule of your own derive a frozen dataclass from this class; its fields are the settings.
    """

    slots: tuple[str, ...] = ()
    """The names of the FP32 vectors that it keeps beside Θ, zero at the start, such as ("velocity",)."""
    shared: bool = True
    """True if Θ and the slots have the same bits on every replica after a round."""
    merges_at_send: bool = False
    """True if θ ← Θ after `on_send`, too, which has moved Θ."""
    needs_deltas: bool = False
    """True if it reads each replica's outer gradient by `Average.deltas`, which reduce_scatter does not have."""

    def facts(self) -> Mapping[str, JSON]:
        """The settings that all replicas must share, by name: the fields."""
        return facts_of(self)

    def on_send(  # noqa: B027
        self, fragment: FragmentState, own: Callable[[], Tensor], sync: Sync, cohort: Cohort
    ) -> None:
        """Act on a fragment that this replica has just sent; most rules do nothing: the average is what counts.

        Args:
            fragment: its state.
            own: makes this replica's own outer gradient as the others will decode it, flat FP32 (N).
            sync: fragment, round and step.
            cohort: the replicas that share the fragment; where they come and go, this one alone.
        """

    def gain(self, rho: float) -> float | None:
        """The part of an outer step along Δ, in Δ, if successive Δ have the cosine ρ; None if it is not known."""
        return None

    @abstractmethod
    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Update Θ and the slots from Δ, in place; the engine merges Θ into θ after that.

        Args:
            fragment: its state.
            average: Δ_p; the memory of its total may be overwritten.
            sync: fragment, round and step.
            cohort: the replicas whose outer gradients were averaged.
        """


def facts_of(settings: Any) -> dict[str, JSON]:
    """The fields of a dataclass by name, as replicas compare them: numbers of any type are floats."""
    return {f.name: _json(getattr(settings, f.name)) for f in fields(settings)}


def _json(value: Any) -> JSON:
    if isinstance(value, tuple | list):
        return [_json(each) for each in value]
    return value if isinstance(value, str | bool | None) else float(value)
