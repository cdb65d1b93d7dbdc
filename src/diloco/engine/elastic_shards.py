"""A sharded replica among others that come and go: its first process is the replica, and the others follow it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from diloco.engine import observe
from diloco.engine.elastic import (
    ElasticMembership,
    accepted_of,
    refusal_to_adopt,
    refuse_if_sent,
    vectors_of,
)
from diloco.engine.gathered import GatheredParameters
from diloco.engine.replica_rounds import ReplicaRounds
from diloco.engine.settings import Settings
from diloco.engine.state import ERROR, OUTER, OuterState
from diloco.exchange.inside import Call, Message
from diloco.outer.step import OuterStep
from diloco.rendezvous.contract import Rendezvous
from diloco.schedule import Sync


class LeadingMembership(ElasticMembership):
    """The first process of a replica: it joins, offers and decides as a replica of one process does.

    Raises:
        DisagreementError: if the run has other settings or initial parameters.
    """

    def __init__(self, settings: Settings, rendezvous: Rendezvous, parameters: GatheredParameters) -> None:
        self._inside = parameters.inside
        with self._inside.failing_together():
            # Θ lies in host memory anyway.
            super().__init__(settings, rendezvous, parameters, offload=False)
            self._report(())

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on, as its other processes read it."""
        if (failure := super().failure) is not None:
            self._inside.fail(failure)
        return failure

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """A context whose errors end this replica's part in the run, and its other processes."""
        with super().failing_together(), self._inside.failing_together():
            yield

    def is_due(self) -> bool:
        """True if something is sent, decided, waited for, or to be looked at."""
        is_due = super().is_due()
        self._inside.lead(Call.STEP if is_due else Call.IDLE)
        return is_due

    def advance(self) -> tuple[OuterStep, ...]:
        """Offer the fragments that are due, and take the outer steps that were decided."""
        return self._report(super().advance())

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Wait for the decisions of own payloads, bounded in time, and take them."""
        self._inside.lead(Call.FINISH)
        return self._report(super().finish(flush=flush))

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes; Θ and the slots lie in the store."""
        state = super().state_dict()
        self._inside.share({name: value for name, value in state.items() if name not in (OUTER, ERROR)})
        return state

    def _report(self, outer_steps: tuple[OuterStep, ...]) -> tuple[OuterStep, ...]:
        """Tell the other processes that nothing follows in this step, and what has happened."""
        rounds = self.rounds
        sees_deltas = rounds.form.second is None  # with averages nobody has all payloads
        report = Report(
            run=self._joined.run,
            replica=rounds.replica,
            rounds=rounds.rounds,
            counted_tokens=rounds.tokens - rounds.uncounted_tokens,
            bytes_sent=rounds.bytes_sent,
            bytes_received=rounds.bytes_received,
            blocked_seconds=rounds.blocked_seconds,
            num_sent=rounds.next_seq,
            outer_steps=[
                _Taken(*o.sync, len(o.cohort.members) if o.cohort and sees_deltas else 0) for o in outer_steps
            ],
        )
        self._inside.lead(Call.DONE, text=msgspec.json.encode(report).decode())
        return outer_steps


class FollowingMembership:
    """Another process of a replica: it hands over its shards of θ, and takes them back."""

    def __init__(self, settings: Settings, parameters: GatheredParameters) -> None:
        self._parameters, self._inside = parameters, parameters.inside
        fragments = range(len(settings.fragments))
        with_error = settings.error_feedback is not None
        nothing = [torch.empty(0) for _ in fragments]
        state = OuterState(nothing, slots=settings.outer.slots, with_error=with_error, offload=False)
        self.rounds = FollowingRounds(settings, parameters, state)
        with self._inside.failing_together():
            self._follow()
        self._call = Call.IDLE

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self._inside.failure

    def failing_together(self) -> AbstractContextManager[None]:
        """A context whose errors the first process hears of."""
        return self._inside.failing_together()

    def is_due(self) -> bool:
        """True if the first process says so, or a merge is to be looked at."""
        self._call = self._inside.follow(Call.STEP, Call.IDLE).call
        return self._call is Call.STEP or bool(self._parameters.watch.merges)

    def advance(self) -> tuple[OuterStep, ...]:
        """Serve what the first process does after this inner step."""
        self._parameters.look_at_merges(self.rounds.num_steps)
        return self._follow() if self._call is Call.STEP else ()

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Serve the end; whether to flush is what the first process was asked for."""
        self._inside.follow(Call.FINISH)
        return self._follow()

    def adopt(self) -> None:
        """Refuse: Θ is what the log says."""
        raise refusal_to_adopt()

    def state_dict(self) -> dict[str, Any]:
        """The first process's plain values, and this one's shards."""
        state = self.rounds.state
        tensors = {kind: self._parameters.all_named(state.at_home(kind)) for kind in (OUTER, ERROR)}
        return self._inside.share() | tensors

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state of this run's model.

        Raises:
            UserError: if it is another's, or this engine has trained.
        """
        refuse_if_sent(self.rounds.report.num_sent)
        return accepted_of(self.rounds, self.rounds.report.run, state), ()

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Hand over the shards of a state; the first process moves θ before the next inner step ends."""
        vectors_of(accepted, self._parameters)
        rounds = self.rounds
        rounds.num_steps, rounds.tokens = accepted["num_steps"], accepted["tokens"]
        rounds.bytes_sent, rounds.bytes_received = accepted["bytes_sent"], accepted["bytes_received"]
        rounds.blocked_seconds = accepted["blocked_seconds"]

    def _follow(self) -> tuple[OuterStep, ...]:
        """Serve the first process until it is done with this step; returns the outer steps that it took."""
        while (message := self._inside.follow(Call.THETA, Call.MERGE, Call.DONE)).call is not Call.DONE:
            self._serve(message)
        self.rounds.hear(report := _REPORTS.decode(message.text))
        return tuple(self._outer_step(taken) for taken in report.outer_steps)

    def _serve(self, message: Message) -> None:
        """Do this process's part of a call."""
        if message.call is Call.THETA:
            self.rounds.check_parameters((message.fragment,))
            self._parameters.give(message.fragment)
        else:
            self._parameters.take(message.fragment, self.rounds.num_steps)

    def _outer_step(self, taken: "_Taken") -> OuterStep:
        """An outer step whose vectors, which are whole in the first process, are empty here."""
        nothing = partial(torch.empty, 0)

        def deltas() -> Iterator[Tensor]:
            return (nothing() for _ in range(taken.num_deltas))

        sync = Sync(taken.fragment, taken.round, taken.step)
        spans, group = self._parameters.spans[taken.fragment], self._parameters.shard_group
        return observe.described(sync, 0.0, nothing, deltas, spans, group)


@dataclass(eq=False)
class FollowingRounds(ReplicaRounds):
    """The counters of a replica in a process that follows, as the first one has sent them."""

    report: "Report" = field(default_factory=lambda: Report())

    @property
    def replica(self) -> int:
        """This replica's number in the run."""
        return self.report.replica

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet, on average over the fragments."""
        return self.tokens - self.report.counted_tokens

    def is_initial(self, p: int) -> bool:
        """Whether no outer step of a fragment was taken."""
        return not self.report.rounds[p]

    def hear(self, report: "Report") -> None:
        """Take the counters of the first process."""
        self.report = report
        self.bytes_sent, self.bytes_received = report.bytes_sent, report.bytes_received
        self.blocked_seconds = report.blocked_seconds


class _Taken(msgspec.Struct):
    """An outer step that the first process has taken."""

    fragment: int
    round: int
    step: int
    num_deltas: int
    """Outer gradients that it has whole; 0 for a snapshot, and with reduce_scatter."""


class Report(msgspec.Struct):
    """The first process's words at the end of a step in which something happened."""

    run: str = ""
    replica: int = 0
    rounds: list[int] = []
    counted_tokens: float = 0.0
    """Tokens that the run has counted, on average over the fragments."""
    bytes_sent: int = 0
    bytes_received: int = 0
    blocked_seconds: float = 0.0
    num_sent: int = 0
    outer_steps: list[_Taken] = []


_REPORTS = msgspec.json.Decoder(Report)
