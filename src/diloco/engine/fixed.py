"""A fixed group of replicas, which a transport joins: they take the same steps, and all are in every round."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from diloco.engine import checkpoint
from diloco.engine.finish import finish
from diloco.engine.loading import loadable
from diloco.engine.model_loads import adopt
from diloco.engine.parameters import FragmentParameters
from diloco.engine.rounds import begin
from diloco.engine.settings import Settings
from diloco.engine.state import OUTER
from diloco.exchange.control import agree, failing_together
from diloco.exchange.transport import Transport
from diloco.outer.step import OuterStep
from diloco.schedule import Due


class FixedMembership:
    """This replica in the group of a transport.

    Raises:
        UserError: if the transport can't do what the settings need.
        DisagreementError: if the replicas were given different settings or initial parameters.
    """

    def __init__(
        self, settings: Settings, transport: Transport, parameters: FragmentParameters, *, offload: bool
    ) -> None:
        self.rounds = begin(settings, transport, parameters, offload=offload)
        self._schedule, self._transport = settings.schedule, transport
        self._due = Due((), ())
        initial = self.rounds.state.at_home(OUTER)
        agree(transport, settings.facts(transport.num_replicas) | parameters.facts(initial))

    @property
    def failure(self) -> str | None:
        """The other replica that has failed, and its reason; None as far as is known."""
        return self._transport.failure

    def failing_together(self) -> AbstractContextManager[None]:
        """A context whose errors the other replicas hear of."""
        return failing_together(self._transport)

    def is_due(self) -> bool:
        """True if something is sent, merged, in flight, or to be looked at."""
        rounds = self.rounds
        self._due = due = self._schedule.due(rounds.num_steps, self._transport.replica)
        return bool(due.send or due.merge or rounds.in_flight or rounds.parameters.watch.merges)

    def advance(self) -> tuple[OuterStep, ...]:
        """Send and merge as the schedule says."""
        rounds, due = self.rounds, self._due
        rounds.check_sends()
        rounds.parameters.look_at_merges(rounds.num_steps)
        if due.send:
            rounds.send(due.send)
        merge = [sync for sync in due.merge if sync.step > rounds.drained_step]
        merged = rounds.merge(merge, forget=rounds.num_steps - self._schedule.max_overlap)
        if due.send or due.merge:
            rounds.expect_next()
        return merged

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step."""
        with self._transport.finishing(self.rounds.num_steps):
            merged = finish(self.rounds, flush=flush)
            self.rounds.drained_step = self.rounds.num_steps
        return merged

    def adopt(self) -> None:
        """Θ ← θ, on all replicas."""
        adopt(self.rounds)

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, what is in flight included."""
        return checkpoint.state_of(self.rounds)

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state as this engine takes it up; it is refused on all replicas, or on none."""
        return loadable(self.rounds, state)

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight."""
        checkpoint.load(self.rounds, accepted)
