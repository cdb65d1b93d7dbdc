"""The part of an engine that is read: its counters and its outer parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from diloco.engine.rounds import Rounds
from diloco.engine.sharded import gathered
from diloco.engine.state import OUTER
from diloco.outer.digest import parameters_hash


class EngineView:
    """The counters and the outer parameters of the rounds of an engine."""

    _rounds: Rounds

    @property
    def num_steps(self) -> int:
        """Inner steps taken."""
        return self._rounds.num_steps

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of all shards, each destination counted."""
        return self._rounds.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Payload bytes of all shards from the other replicas that were merged."""
        return self._rounds.bytes_received

    @property
    def blocked_seconds(self) -> float:
        """How long training has waited for payloads."""
        return self._rounds.blocked_seconds

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, shaped and sharded as in the model: what to ship.

        They are views, which the next outer step changes; with `offload` of host memory. Evaluate a sharded model
        in `outer_in_place`: `functional_call` would silently take the parameters that FSDP has gathered itself.
        """
        return self._rounds.parameters.all_named(self._rounds.state.at_home(OUTER))

    @contextmanager
    def outer_in_place(self) -> Iterator[None]:
        """The model with Θ in the place of its own parameters, which it gets back; take no inner step in there."""
        with self._rounds.parameters.replaced_by(self.outer_parameters()):
            yield

    def leave_outer_in_place(self) -> None:
        """Leave Θ in the model for good, after `finish()`: so that whatever saves the model saves Θ."""
        self._rounds.parameters.set(self.outer_parameters())

    def outer_hash(self) -> str:
        """SHA-256 over Θ, equal on all replicas after `finish()`; every process of a replica must call it."""
        return parameters_hash(self.outer_parameters(), gathered)
