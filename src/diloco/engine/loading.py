"""The states that an engine takes up: each is checked whole, on all replicas, before anything is changed.

With nothing in flight a state goes on in an engine with other settings: Θ and the slots of the outer rule are all
that it hands over, and they are the same on every replica.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.engine.rounds import Rounds
from diloco.engine.state import ERROR, OUTER
from diloco.engine.state_form import check_like, in_own_names, plain_values_checked, refuse_names
from diloco.errors import DisagreementError, UserError
from diloco.exchange.control import agree, share
from diloco.outer.digest import parameters_hash
from diloco.schedule import Sync


def loadable(rounds: Rounds, state: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A state as this engine takes it up; it is refused on all replicas, or on none, and nothing is changed.

    Args:
        rounds: the engine's.
        state: what the user passed.

    Returns:
        The state with the engine's own names and a tensor for each of its parameters, and the names of the
        parameters that were unfrozen since it was saved: their Θ is the model's present value.

    Raises:
        DisagreementError: if the replicas load different steps, or states of different runs.
        UserError: if the state does not belong to this engine.
    """
    refusal, accepted, unfrozen = None, {}, ()
    try:
        accepted, unfrozen = _accepted(rounds, state)
    except UserError as error:
        refusal = str(error)
    facts = {
        "step of the loaded state": accepted.get("num_steps"),
        "in flight in the loaded state (fragment, round, step)": accepted.get("in_flight"),
    }
    with rounds.all_shards_or_none():
        refuse_together(rounds, {"why the state can't be loaded": refusal} | facts, refusal)
        _compare_runs(rounds, accepted)
    return accepted, unfrozen


def refuse_together(rounds: Rounds, facts: Mapping[str, object], refusal: str | None) -> None:
    """Raise the refusal, and on the replicas that have none, the difference.

    Raises:
        DisagreementError: if a fact differs, and this replica has no refusal.
        UserError: with the refusal.
    """
    try:
        agree(rounds.transport, facts)
    except DisagreementError:
        if refusal is None:
            raise
    if refusal is not None:
        raise UserError(refusal)


def _accepted(rounds: Rounds, state: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    checked = plain_values_checked(state)
    _check_settings(rounds, checked)
    flying = [fragment for fragment, *_ in checked["in_flight"]]
    if len(set(flying)) < len(flying) or not set(flying) <= set(range(rounds.state.num_fragments)):
        raise UserError(f"the state has fragments {flying} in flight, each of which must be here, and only once")
    own = rounds.parameters.all_named(rounds.state.at_home(OUTER))
    named = in_own_names(checked, rounds.state.kinds, own)
    if named["in_flight"] and named["fragments"] not in (None, _fragments_of(rounds)):
        raise UserError(
            "the state was saved with something in flight and other fragments: to go on with other fragments, "
            "call finish() before state_dict()"
        )
    unfrozen = _check_names(rounds, named, own)
    return _completed(rounds, named, own), unfrozen


_NOT_IN_OLDER_STATES = ("replica", "outer_rule")


def _check_settings(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """Refuse other settings than those that give meaning to the state."""
    settings, transport = rounds.settings, rounds.transport
    mine = settings.facts_of_state(transport.replica, transport.num_replicas)
    then = "load it into an engine with the settings of the one that saved it"
    if state["in_flight"]:
        then += ", or call finish() before state_dict(), after which settings may change"
    else:
        mine = {name: mine[name] for name in _counting_when_drained(rounds, state)}
    for name, value in mine.items():
        if state.get(name) != value and (name in state or name not in _NOT_IN_OLDER_STATES):
            raise UserError(
                f"the state was saved with {name}={state.get(name)}, and this engine has {value}: {then}"
            )


def _counting_when_drained(rounds: Rounds, state: Mapping[str, Any]) -> tuple[str, ...]:
    if not rounds.settings.outer.shared:
        return ("outer_rule", "num_replicas", "replica")
    beta, num_replicas = rounds.settings.error_feedback, rounds.transport.num_replicas
    if beta is not None and (state.get("error_feedback"), state.get("num_replicas")) == (beta, num_replicas):
        return ("outer_rule", "replica")  # the error is there, and is the replica's own
    return ("outer_rule",)


def _check_names(rounds: Rounds, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Refuse missing and unexpected parameters, and tensors of other shapes; returns the unfrozen parameters."""
    saved = state[OUTER]
    frozen = set() if state["in_flight"] else rounds.parameters.names_in_model() - set(own)
    refuse_names("has", (name for name in saved if name not in own and name not in frozen), OUTER)
    listed = {name for part in state["fragments"] or () for name in part}
    unfrozen = tuple(name for name in own if name not in saved)
    if state["in_flight"] or len(unfrozen) == len(own):
        refuse_names("lacks", unfrozen, OUTER)
    refuse_names("lacks", (name for name in unfrozen if name in listed), OUTER)
    check_like(OUTER, saved, own)
    kinds = [kind for kind in rounds.state.kinds[1:] if kind != ERROR or _keeps_error(rounds, state)]
    for kind in kinds:
        refuse_names("lacks", (name for name in saved if name not in state[kind]), kind)
        refuse_names("has", (name for name in state[kind] if name not in saved), kind)
        check_like(kind, state[kind], own)
    for fragment, *_ in state["in_flight"]:
        names = rounds.settings.fragments[fragment].parameters
        refuse_names("lacks", (name for name in names if name not in state["sent"]), "sent")
        check_like("sent", {name: state["sent"][name] for name in names}, own)
    return unfrozen


def _keeps_error(rounds: Rounds, state: Mapping[str, Any]) -> bool:
    """True if the state has this replica's own error of the same error feedback."""
    mine = rounds.transport.replica, rounds.settings.error_feedback
    return mine[1] is not None and (state.get("replica", mine[0]), state.get("error_feedback")) == mine


def _completed(rounds: Rounds, state: dict[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state with Θ = θ for parameters without Θ, zeros for other vectors that it lacks, and `last_sent`."""
    theta = {
        name: shard
        for fragment, names in enumerate(_fragments_of(rounds))
        for name, shard in zip(names, rounds.parameters.shards(fragment), strict=True)
    }
    for kind in rounds.state.kinds:
        saved = state[kind] if kind != ERROR or _keeps_error(rounds, state) else {}
        lacking = theta if kind == OUTER else {n: torch.zeros(()).expand(t.shape) for n, t in theta.items()}
        state[kind] = {name: saved.get(name, lacking[name]) for name in own}
    if state["fragments"] is None:
        by_name = dict(zip(own, _last_scheduled(rounds, state["num_steps"]), strict=True))
    else:
        steps = zip(state["fragments"], state["last_sent"], strict=True)
        by_name = {name: step for names, step in steps for name in names}
    state["last_sent"] = [min(by_name.get(name, 0) for name in names) for names in _fragments_of(rounds)]
    return state


def _last_scheduled(rounds: Rounds, num_steps: int) -> list[int]:
    """For each parameter the last step after which it was to be sent; 0 if there is none."""
    schedule, steps = rounds.settings.schedule, []
    for p, fragment in enumerate(rounds.settings.fragments):
        num_sent = schedule.num_sent(p, num_steps)
        steps += [schedule.send_step(p, num_sent) if num_sent else 0] * len(fragment.parameters)
    return steps


def _fragments_of(rounds: Rounds) -> list[list[str]]:
    return [list(fragment.parameters) for fragment in rounds.settings.fragments]


def _compare_runs(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """Refuse states whose shared vectors differ where the same rounds were merged.

    Raises:
        DisagreementError: naming the fragment and two replicas.
    """
    rule, transport = rounds.settings.outer, rounds.transport
    if not rule.shared or transport.num_replicas == 1:
        return
    # In flight, a round may be merged on one replica and not yet on another; all others were merged everywhere.
    merged: dict[int, int] = {}
    for sync in (Sync(*values) for values in state["in_flight"]):
        is_merged = sync.step + rounds.settings.schedule.overlap(transport.replica) <= state["num_steps"]
        merged[sync.fragment] = sync.round if is_merged else sync.round - 1
    mine = []
    for p in range(len(rounds.settings.fragments)):
        vectors = {kind: rounds.parameters.flat_of(p, state[kind]) for kind in (OUTER, *rule.slots)}
        mine.append([merged.get(p), parameters_hash(vectors)])
    everyones = share(transport, mine, list[tuple[int | None, str]])
    for p in range(len(mine)):
        first: dict[int | None, tuple[int, str]] = {}
        for replica, (last_round, digest) in enumerate(fragments[p] for fragments in everyones):
            other, expected = first.setdefault(last_round, (replica, digest))
            if digest != expected:
                names = " or ".join(("outer parameters", *rule.slots))
                raise DisagreementError(
                    f"replica {other} and replica {replica} load states of different runs: their {names} of "
                    f"fragment {p} differ; load the states that the replicas of one run saved at the same step"
                )
