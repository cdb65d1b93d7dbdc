"""The form of a saved state, its checks, and the parts that an engine with other settings can load.

Shapes: N elements of one fragment that this process holds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import msgspec
import torch
from torch import Tensor

from diloco.engine.outer_state import ERROR, OUTER, SENT_THETA
from diloco.engine.parameters import own_place
from diloco.engine.replica import Replica
from diloco.engine.settings import Settings
from diloco.errors import DisagreementError, FileError, UserError, listed
from diloco.exchange.transport import Transport, agree, share
from diloco.outer.digest import parameters_hash
from diloco.schedule import Sync
from diloco.schema import Count, Seconds, converted, without_format

FORMAT = 1
"""Version of an engine's state, which it names."""
_NOT_OURS = "pass what state_dict() of an engine gave"


@dataclass(frozen=True, kw_only=True)
class _Values:
    """The plain values of any state; lists are by fragment."""

    last_sent: list[Count]
    num_steps: Count
    tokens: Count
    bytes_sent: Count
    bytes_received: Count
    blocked_seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class _FixedValues(_Values):
    """The plain values of a replica of a fixed group, but for its settings."""

    fragments: list[list[str]]
    """Names of the parameters."""
    drained_step: Count
    in_flight: list[tuple[Count, Count, Count]]
    """Fragment, round and step of each flight."""
    weighed: list[tuple[Count, Annotated[float, msgspec.Meta(ge=0)]]]
    """The tokens read up to the fragment's last send, and the amount that set its weight."""


@dataclass(frozen=True, kw_only=True)
class _ElasticValues(_Values):
    """The plain values of a replica among others that come and go, but for its run."""

    slot: Count
    rounds: list[Count]
    next_send: list[Count]
    counted: list[tuple[Count, Count]]


def _values(state: object, kind: type[_Values]) -> dict[str, Any]:
    """A copy of a state's plain values.

    Raises:
        UserError: if one is absent or of another type.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"the state is a {type(state).__name__}, and not a dict: {_NOT_OURS}")
    values = {field.name: state[field.name] for field in fields(kind) if field.name in state}
    try:
        without_format(state, FORMAT, source="the state")
        return dict(vars(converted(values, kind, source="the state")))
    except FileError as error:
        raise UserError(f"{error}: {_NOT_OURS}") from None


def elastic_values_checked(state: object, *, num_fragments: int) -> dict[str, Any]:
    """The plain values of the state of a replica among others that come and go.

    Raises:
        UserError: if one is absent or of another type, or a list has another length than there are fragments.
    """
    values = _values(state, _ElasticValues)
    _check_lengths(values, ("rounds", "last_sent", "next_send", "counted"), num_fragments)
    return values


def _check_lengths(values: Mapping[str, Any], names: Iterable[str], num_fragments: int) -> None:
    for name in names:
        if len(values[name]) != num_fragments:
            raise UserError(
                f"the state has {len(values[name])} values as {name}, and there are {num_fragments} fragments: "
                f"{_NOT_OURS}"
            )


def in_own_names(state: dict[str, Any], kinds: Iterable[str], own: Iterable[str]) -> dict[str, Any]:
    """The state, renamed in place to the engine's names where only the prefixes of wrappers differ.

    Raises:
        UserError: if something else stands in the place of a kind's tensors.
    """
    for kind in (*kinds, "sent"):
        state[kind] = tensors_checked(state, kind)
    own_by_bare = {_bare(name): name for name in own}
    names = {name: own_by_bare.get(_bare(name), name) for name in map(str, state[OUTER])}
    if len(set(own_by_bare.values())) < len(list(own)) or len(set(names.values())) < len(names):
        return state  # the prefixes are all that tells two names apart
    for kind in (*kinds, "sent"):
        state[kind] = {names.get(name, name): tensor for name, tensor in state[kind].items()}
    state["fragments"] = [[names.get(name, name) for name in part] for part in state["fragments"]]
    return state


def tensors_checked(state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """A copy of a kind's tensors.

    Raises:
        UserError: if something else stands in their place.
    """
    tensors = state.get(kind)
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"the state has no tensors by parameter name as {kind}: {_NOT_OURS}")
    return dict(tensors)


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _bare(name: str) -> str:
    """A parameter's name without what torch.compile, FSDP and DDP put into it.

    >>> _bare("module._orig_mod.blocks.0._fsdp_wrapped_module.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("module.")


def refuse_names(verb: Literal["has", "lacks"], names: Iterable[str], kind: str) -> None:
    """Refuse a state that has names which it must not have, or lacks names; without names do nothing."""
    names = list(names)
    if names:
        which = "which the model does not have" if verb == "has" else "which the engine exchanges"
        raise UserError(f"the state {verb} {listed(names, 3)} in {kind}, {which}: load a state of the same model")


def check_like(kind: str, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse a kind's tensors that are not FP32, or of another shape or sharding than the engine's own.

    Raises:
        UserError: naming the parameter and both.
    """
    for name, tensor in tensors.items():
        if (like := own.get(name)) is None:
            continue  # it is frozen now
        if tensor.shape != like.shape or tensor.dtype != torch.float32:
            raise UserError(
                f"the state's {kind} of {name} is {tuple(tensor.shape)} in {tensor.dtype}, and here it is "
                f"{tuple(like.shape)} in {torch.float32}: load a state of the same model, as it was saved"
            )
        if own_place(tensor, part=False) != own_place(like, part=False):
            raise UserError(
                f"the state's {kind} of {name} is not sharded as the model is: read the state with "
                "torch.distributed.checkpoint.load into this engine, or into its state_dict()"
            )


def loadable(replica: Replica, transport: Transport, state: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A state in the form that this engine loads; all replicas refuse it, or none, and nothing is changed.

    Args:
        replica: this one.
        transport: the way to the others.
        state: the one that the user passed.

    Returns:
        The state with the engine's own names and a tensor for each of its parameters, and the names of the
        parameters that were unfrozen since it was saved: their Θ is the model's present value.

    Raises:
        DisagreementError: if the replicas load different steps, or states of different runs, or after different
            numbers of steps: what one has sent the others would take for what is sent after the load.
        UserError: if the state does not belong to this engine.
    """
    refusal, accepted, unfrozen = None, {}, ()
    try:
        accepted, unfrozen = _accepted(replica, transport.num_replicas, state)
    except UserError as error:
        refusal = str(error)
    steps, loaded = "number of this engine's inner steps at load_state_dict()", "step of the loaded state"
    reason = "why the state can't be loaded"
    facts = {
        steps: replica.num_steps,
        loaded: accepted.get("num_steps"),
        "in flight in the loaded state (fragment, round, step)": accepted.get("in_flight"),
    }
    with replica.fail_together():
        same = "load states of one step on all replicas, of the newest of which each has one, or on none"
        remedies = {
            steps: "go back after the same step on all replicas, or load into new engines",
            reason: same,
            loaded: same,
        }
        agree_or_refuse(transport, {reason: refusal} | facts, refusal, remedies=remedies)
        _compare_runs(replica, transport, accepted)
    return accepted, unfrozen


def agree_or_refuse(
    transport: Transport,
    facts: Mapping[str, object],
    refusal: str | None,
    *,
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise the refusal, and on the replicas that have none, the difference.

    Raises:
        DisagreementError: if a fact differs, and this replica has no refusal.
        UserError: with the refusal.
    """
    try:
        agree(transport, facts, remedies=remedies)
    except DisagreementError:
        if refusal is None:
            raise
    if refusal is not None:
        raise UserError(refusal)


def _accepted(replica: Replica, num_replicas: int, state: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The state as this replica takes it, and the parameters that were unfrozen since; refuse another run's."""
    values = _values(state, _FixedValues)
    _check_lengths(values, ("last_sent", "weighed"), len(values["fragments"]))
    checked = {SENT_THETA: {}, **cast(Mapping[str, Any], state), **values}
    _check_settings(replica, num_replicas, checked)
    flying = [fragment for fragment, *_ in checked["in_flight"]]
    if len(set(flying)) < len(flying) or not set(flying) <= set(range(replica.state.num_fragments)):
        raise UserError(f"the state has fragments {flying} in flight, each of which must be here, and only once")
    own = replica.parameters.by_name
    named = in_own_names(checked, replica.state.kinds, own)
    if named["in_flight"] and named["fragments"] != _fragments_of(replica):
        raise UserError(
            "the state was saved with something in flight and other fragments: to go on with other fragments, "
            "call finish() before state_dict()"
        )
    unfrozen = _check_names(replica, named, own)
    return _completed(replica, named, own), unfrozen


def _check_settings(replica: Replica, num_replicas: int, state: Mapping[str, Any]) -> None:
    """Refuse other settings than those that give meaning to the state."""
    mine = replica.settings.facts_of_state(replica.number, num_replicas)
    then = "load it into an engine with the settings of the one that saved it"
    if state["in_flight"]:
        then += ", or call finish() before state_dict(), after which settings may change"
    else:
        mine = {name: mine[name] for name in _counting_when_drained(replica.settings, num_replicas, state)}
    for name, value in mine.items():
        if state.get(name) != value:
            raise UserError(
                f"the state was saved with {name}={state.get(name)}, and this engine has {value}: {then}"
            )


def _counting_when_drained(settings: Settings, num_replicas: int, state: Mapping[str, Any]) -> tuple[str, ...]:
    if not settings.outer.shared:
        return ("outer_rule", "num_replicas", "replica")
    beta = settings.error_feedback
    if beta is not None and (state.get("error_feedback"), state.get("num_replicas")) == (beta, num_replicas):
        return ("outer_rule", "replica")  # the error is there, and is the replica's own
    return ("outer_rule",)


def _check_names(replica: Replica, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Refuse missing and unexpected parameters, and tensors of other shapes; returns the unfrozen parameters."""
    saved = state[OUTER]
    frozen = set() if state["in_flight"] else replica.parameters.names_in_model() - set(own)
    refuse_names("has", (name for name in saved if name not in own and name not in frozen), OUTER)
    listed = {name for part in state["fragments"] for name in part}
    unfrozen = tuple(name for name in own if name not in saved)
    if state["in_flight"] or len(unfrozen) == len(own):
        refuse_names("lacks", unfrozen, OUTER)
    refuse_names("lacks", (name for name in unfrozen if name in listed), OUTER)
    check_like(OUTER, saved, own)
    is_needed = {ERROR: _keeps_error(replica, state), SENT_THETA: bool(state["in_flight"])}
    kinds = [kind for kind in replica.state.kinds[1:] if is_needed.get(kind, True)]
    for kind in kinds:
        refuse_names("lacks", (name for name in saved if name not in state[kind]), kind)
        refuse_names("has", (name for name in state[kind] if name not in saved), kind)
        check_like(kind, state[kind], own)
    for fragment, *_ in state["in_flight"]:
        names = replica.settings.fragments[fragment].parameters
        refuse_names("lacks", (name for name in names if name not in state["sent"]), "sent")
        check_like("sent", {name: state["sent"][name] for name in names}, own)
    return unfrozen


def _keeps_error(replica: Replica, state: Mapping[str, Any]) -> bool:
    """True if the state has this replica's own error of the same error feedback."""
    mine = replica.number, replica.settings.error_feedback
    return mine[1] is not None and (state.get("replica"), state.get("error_feedback")) == mine


def _completed(replica: Replica, state: dict[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state with Θ = θ for parameters without Θ, zeros for other vectors that it lacks, and `last_sent`."""
    theta = {
        name: shard
        for fragment, names in enumerate(_fragments_of(replica))
        for name, shard in zip(names, replica.parameters.shards(fragment), strict=True)
    }
    for kind in replica.state.kinds:
        saved = state[kind] if kind != ERROR or _keeps_error(replica, state) else {}
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        lacking = theta if kind == OUTER else {n: zero.expand(t.shape) for n, t in theta.items()}
        state[kind] = {name: saved.get(name, lacking[name]) for name in own}
    for kind, none in (("last_sent", 0), ("weighed", (0, 0.0))):
        by_name = {n: v for names, v in zip(state["fragments"], state[kind], strict=True) for n in names}
        state[kind] = [min(by_name.get(name, none) for name in names) for names in _fragments_of(replica)]
    return state


def _fragments_of(replica: Replica) -> list[list[str]]:
    return [list(fragment.parameters) for fragment in replica.settings.fragments]


def _compare_runs(replica: Replica, transport: Transport, state: Mapping[str, Any]) -> None:
    """Refuse states whose shared vectors differ where the same rounds were merged.

    Raises:
        DisagreementError: naming the fragment and two replicas.
    """
    rule = replica.settings.outer
    if not rule.shared or transport.num_replicas == 1:
        return
    # In flight, a round may be merged on one replica and not yet on another; all others were merged everywhere.
    merged: dict[int, int] = {}
    for sync in (Sync(*values) for values in state["in_flight"]):
        is_merged = sync.step + replica.settings.schedule.overlap(transport.replica) <= state["num_steps"]
        merged[sync.fragment] = sync.round if is_merged else sync.round - 1
    mine = []
    for p in range(len(replica.settings.fragments)):
        vectors = {kind: replica.parameters.flat_of(p, state[kind]) for kind in (OUTER, *rule.slots)}
        mine.append([merged.get(p), parameters_hash(vectors)])
    everyones = share(transport, mine, list[tuple[int | None, str]])
    for p in range(len(mine)):
        first: dict[int | None, tuple[int, str]] = {}
        for number, (last_round, digest) in enumerate(fragments[p] for fragments in everyones):
            other, expected = first.setdefault(last_round, (number, digest))
            if digest != expected:
                names = " or ".join(("outer parameters", *rule.slots))
                raise DisagreementError(
                    f"replica {other} and replica {number} load states of different runs: their {names} of "
                    f"fragment {p} differ; load the states that the replicas of one run saved at the same step"
                )
