"""The contract between the engine and the group of its replica: a fixed one, or one that changes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from diloco.engine.replica_rounds import ReplicaRounds
from diloco.outer.step import OuterStep


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
