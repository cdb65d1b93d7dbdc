"""A replica among others that come and go: when it offers a fragment, what resumes, how it ends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from diloco.engine.elastic_rounds import ElasticRounds
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica_rounds import ReplicaRounds, outer_state
from diloco.engine.settings import Settings
from diloco.engine.state import ERROR, OUTER
from diloco.engine.state_form import check_like, elastic_values_checked, refuse_names, tensors_checked
from diloco.errors import UserError
from diloco.outer.step import OuterStep
from diloco.rendezvous.contract import Form, Rendezvous


class ElasticMembership:
    """This replica in a run of a rendezvous, which it joins.

    Raises:
        DisagreementError: if the run has other settings or initial parameters.
    """

    def __init__(
        self, settings: Settings, rendezvous: Rendezvous, parameters: FragmentParameters, *, offload: bool
    ) -> None:
        state = outer_state(settings, parameters, offload=offload)
        sizes = tuple(state.num_elements(p) for p in range(state.num_fragments))
        form = Form(codec=settings.wire, sizes=sizes, seed=settings.seed, second=settings.reduction.second)
        facts = settings.shared_facts() | parameters.facts(state.at_home(OUTER))
        schedule = settings.schedule
        self._joined = joined = rendezvous.join(facts, form, sync_every=schedule.sync_every)
        self.rounds = ElasticRounds(
            settings, parameters, state, rendezvous=rendezvous, form=joined.form, slot=joined.slot
        )
        self.rounds.catch_up(joined)
        self._rendezvous, self._sync_every = rendezvous, schedule.sync_every
        self._next_send = [schedule.send_step(p) for p in range(schedule.num_fragments)]
        self._min_steps = schedule.sync_every if rendezvous.waits else max(1, schedule.sync_every // 4)
        self._must_load = rendezvous.waits and any(self.rounds.rounds)
        self._translation: dict[int, Tensor | None] = {}
        """For each fragment the Θ that a checkpoint knew; None to take the run's."""
        self._then: dict[str, Any] = {}
        """Slot, rounds, Θ and errors of a checkpoint, vectors flat by fragment; empty once θ was moved."""

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self._rendezvous.failure

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """A context whose errors end this replica's part in the run."""
        try:
            yield
        except Exception as error:
            self._rendezvous.abort(str(error) or type(error).__name__)
            raise

    def is_due(self) -> bool:
        """True if something is sent, decided, waited for, or to be looked at."""
        rounds = self.rounds
        self._rendezvous.at_step(rounds.num_steps)
        return bool(
            self._rendezvous.has_news
            or self._must_load
            or self._translation
            or rounds.parameters.watch.merges
            or rounds.waiting
            or any(rounds.num_steps >= step for step in self._next_send)
            or (rounds.in_flight and self._rendezvous.waits)
            or self._rendezvous.wanted()
        )

    def advance(self) -> tuple[OuterStep, ...]:
        """Offer the fragments that are due, and take the outer steps that were decided."""
        self._check_place()
        rounds = self.rounds
        self._translate()
        rounds.parameters.look_at_merges(rounds.num_steps)
        for p in self._due():
            rounds.send(p)
            self._next_send[p] = rounds.num_steps + self._sync_every
        return rounds.merge(wait=self._rendezvous.waits)

    def _check_place(self) -> None:
        """Refuse to begin among replicas that wait for each other and are at another place of the schedule."""
        if self._must_load:
            self._rendezvous.leave(finished=False)
            raise UserError(
                "the run waits for all of its replicas (quorum=all) and has begun: one that begins at another "
                "place of the schedule and all others would wait for each other; load the state that this replica "
                "has saved, or create a run with quorum=majority",
                "quorum",
            )

    def _due(self) -> list[int]:
        """The fragments to offer: H steps after the last time, or sooner if another's payload waits for ours."""
        rounds, wanted = self.rounds, set(self._rendezvous.wanted())
        early = self._sync_every - self._min_steps
        return [
            p
            for p, step in enumerate(self._next_send)
            if rounds.has_uncounted(p) and rounds.num_steps >= (step - early if p in wanted else step)
        ]

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Wait for the decisions of own payloads, bounded in time, and take them and what else was decided."""
        rounds = self.rounds
        self._translate()
        merged = self._drained()
        if flush:
            for p in range(rounds.state.num_fragments):
                if rounds.has_uncounted(p):
                    rounds.send(p)
            merged += self._drained()
        return merged

    def _drained(self) -> tuple[OuterStep, ...]:
        """The outer steps of what is in flight."""
        rounds = self.rounds
        self._rendezvous.drain()
        for flight in rounds.in_flight.values():
            flight.due_step = min(flight.due_step, rounds.num_steps)
        return rounds.merge(wait=True)

    def adopt(self) -> None:
        """Refuse: Θ is what the log says."""
        raise refusal_to_adopt()

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes; Θ and the slots lie in the store.

        Until θ is moved from a loaded state's Θ to the run's, Θ and its round are still those of that state.
        """
        rounds, named = self.rounds, self.rounds.parameters.all_named
        known = self._then or {
            "slot": self._joined.slot,
            "rounds": rounds.rounds,
            OUTER: rounds.state.at_home(OUTER),
            ERROR: rounds.state.at_home(ERROR),
        }
        return {
            "run": self._joined.run,
            "slot": known["slot"],
            "rounds": list(known["rounds"]),
            "num_steps": rounds.num_steps,
            "tokens": rounds.tokens,
            "bytes_sent": rounds.bytes_sent,
            "bytes_received": rounds.bytes_received,
            "blocked_seconds": rounds.blocked_seconds,
            "last_sent": list(rounds.last_sent),
            "next_send": list(self._next_send),
            "counted": [list(pair) for pair in rounds.counted],
            # Copies: whoever loads in place must not change the run's Θ.
            OUTER: named(outer_N.clone() for outer_N in known[OUTER]),
            ERROR: named(error_N.clone() for error_N in known[ERROR]),
        }

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state of this run's model.

        Raises:
            UserError: if it is another's, or this engine has trained: what it has sent may be counted.
        """
        refuse_if_sent(self.rounds.next_seq)
        return accepted_of(self.rounds, self._joined.run, state), ()

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Go on where a replica was: θ ← θ + Θ_now − Θ_then, or Θ_now where the run has counted work since then.

        The model's own parameters may be loaded before or after this: θ is moved before the next inner step ends.
        """
        self._must_load = False
        rounds = self.rounds
        rounds.num_steps, rounds.tokens = accepted["num_steps"], accepted["tokens"]
        rounds.tokens_before = rounds.tokens
        rounds.bytes_sent, rounds.bytes_received = accepted["bytes_sent"], accepted["bytes_received"]
        rounds.blocked_seconds, rounds.last_sent = accepted["blocked_seconds"], list(accepted["last_sent"])
        self._next_send = list(accepted["next_send"])
        rounds.counted = [(tokens, steps) for tokens, steps in accepted["counted"]]
        slot, then, errors = accepted["slot"], *vectors_of(accepted, rounds.parameters)
        self._then = {"slot": slot, "rounds": accepted["rounds"], OUTER: then, ERROR: errors}
        for p, (last_round, then_N) in enumerate(zip(accepted["rounds"], then, strict=True)):
            # Nobody else holds this replica's slot: what the saved θ − Θ stands for is counted here, or was.
            is_newer = slot != self._joined.slot or self._rendezvous.last_round(slot, p) > last_round
            self._translation[p] = None if is_newer else then_N
            if errors and not is_newer:
                rounds.keep_error(p, errors[p])

    def _translate(self) -> None:
        """Move θ from the Θ that a checkpoint knew to the run's."""
        rounds = self.rounds
        for p, then_N in self._translation.items():
            if then_N is None:
                rounds.take_outer_parameters(p)
                rounds.counted[p] = rounds.tokens, rounds.num_steps
                continue
            move_N = rounds.state.use(OUTER, p) - then_N.to(rounds.parameters.device)
            with rounds.parameters.merging(p, rounds.num_steps) as theta:
                for own, part_n in zip(theta, move_N.split([own.numel() for own in theta]), strict=True):
                    own.add_(part_n.view(own.shape))
        self._translation.clear()
        self._then.clear()


def refuse_if_sent(num_sent: int) -> None:
    """Refuse a state where this replica has sent outer gradients, which may be counted.

    Raises:
        UserError: if it has.
    """
    if num_sent:
        raise UserError(
            "this engine has sent outer gradients already: build a new engine with a new StoreRendezvous, and "
            "load the state there"
        )


def accepted_of(rounds: ReplicaRounds, run: str, state: object) -> dict[str, Any]:
    """A state of this run's model.

    Raises:
        UserError: if it is another's, or lacks what `state_dict` gives.
    """
    if not isinstance(state, Mapping) or state.get("run") != run:
        raise UserError("the state is not that of a replica of this run: load the state that such a one saved")
    settings, own = rounds.settings, rounds.parameters.by_name
    accepted = {"run": run, **elastic_values_checked(state, num_fragments=len(settings.fragments))}
    for kind, names in ((OUTER, own), (ERROR, own if settings.error_feedback is not None else ())):
        accepted[kind] = tensors_checked(state, kind)
        refuse_names("has", (name for name in accepted[kind] if name not in names), kind)
        refuse_names("lacks", (name for name in names if name not in accepted[kind]), kind)
        check_like(kind, accepted[kind], own)
    return accepted


def vectors_of(accepted: Mapping[str, Any], parameters: FragmentParameters) -> tuple[list[Tensor], list[Tensor]]:
    """Θ of each fragment in a state, and the error, which may be of none."""
    fragments = range(len(accepted["rounds"]))
    outer, errors = (
        [parameters.flat_of(p, accepted[kind]) for p in fragments] if accepted[kind] else []
        for kind in (OUTER, ERROR)
    )
    return outer, errors


def refusal_to_adopt() -> UserError:
    """The error of a call of adopt()."""
    return UserError(
        "adopt() has no meaning where replicas come and go: the outer parameters are what the run's log says; "
        "begin another run from these parameters"
    )
