"""The outer parameters in a replica's memory, which must stay what the last outer step left."""

from collections.abc import Sequence

from diloco.engine.state import OUTER, OuterState
from diloco.errors import DisagreementError


class Digests:
    """The digests of Θ_p and of the slots, as they were kept last.

    Args:
        state: Θ and the slots.
        slots: names of the outer rule's vectors.
    """

    def __init__(self, state: OuterState, slots: Sequence[str]) -> None:
        self.kinds = (OUTER, *slots)
        """The kinds of vectors that are checked."""
        self._state = state
        self._digests = [{kind: state.digest(p, kind) for kind in self.kinds} for p in range(state.num_fragments)]

    def base(self, p: int) -> int:
        """The digest of Θ_p, by which replicas compare it."""
        return self._digests[p][OUTER]

    def note(self, kind: str, p: int) -> None:
        """Note that a vector was changed."""
        if kind in self.kinds:
            self._digests[p][kind] = self._state.digest(p, kind)

    def check(self, p: int, step: int) -> None:
        """Refuse a Θ_p, or a slot, that has changed since then, before anybody else hears of it.

        Raises:
            DisagreementError: naming the vector and the inner step.
        """
        for kind, digest in self._digests[p].items():
            if self._state.digest(p, kind) != digest:
                name = "outer parameters" if kind == OUTER else f"outer rule's {kind}"
                raise DisagreementError(
                    f"step {step}: the last outer step left other bits in the {name} of fragment {p}: this "
                    "computer's memory changed; nothing was sent or merged: start this replica again"
                )
