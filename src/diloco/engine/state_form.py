"""The form of a saved state: its keys and types, its parameters' names, their shapes; no settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from diloco.engine.settings import COUNTERS
from diloco.engine.sharded import local
from diloco.engine.state import ERROR, OUTER
from diloco.errors import FileError, UserError
from diloco.schema import Count, Seconds, converted

_NOT_OURS = "pass what state_dict() of an engine gave"


def plain_values_checked(state: object) -> dict[str, Any]:
    """A copy of the state, if its plain values have the right types.

    Raises:
        UserError: if the state is not an engine's.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"the state is a {type(state).__name__}, and not a dict: {_NOT_OURS}")
    since = [name for name in ("tokens",) if name in state]  # they are in no older state
    for name in (*COUNTERS, *since):
        kind = (int, float) if name == "blocked_seconds" else int
        if not isinstance(state.get(name), kind) or isinstance(state[name], bool) or state[name] < 0:
            raise UserError(f"the state has no number as {name}: {_NOT_OURS}")
    in_flight = state.get("in_flight")
    if not isinstance(in_flight, Sequence) or not all(
        _is_list_of(sync, int) and len(sync) == 3 for sync in in_flight
    ):
        raise UserError(f"the state has no list of fragment, round and step as in_flight: {_NOT_OURS}")
    fragments: Any = state.get("fragments")
    last_sent: Any = state.get("last_sent")
    if "fragments" in state:  # it is in no older state
        is_cut = _is_list_of(fragments, (list, tuple)) and all(_is_list_of(names, str) for names in fragments)
        if not (is_cut and _is_list_of(last_sent, int) and len(last_sent) == len(fragments)):
            raise UserError(f"the state's fragments and last_sent are damaged: {_NOT_OURS}")
    return {
        **state,
        "in_flight": [list(sync) for sync in in_flight],
        "fragments": fragments,
        "last_sent": last_sent,
    }


def _is_list_of(values: Any, kind: type | tuple[type, ...]) -> TypeGuard[Sequence[Any]]:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)


def in_own_names(state: dict[str, Any], kinds: Iterable[str], own: Iterable[str]) -> dict[str, Any]:
    """The state, changed in place, with the engine's names where the prefixes of wrappers are all that differs.

    Raises:
        UserError: if something else stands in the place of a kind's tensors.
    """
    for kind in (*kinds, "sent"):
        state[kind] = tensors_checked({ERROR: {}, **state}, kind)
    own_by_bare = {_bare(name): name for name in own}
    names = {name: own_by_bare.get(_bare(name), name) for name in map(str, state[OUTER])}
    if len(set(own_by_bare.values())) < len(list(own)) or len(set(names.values())) < len(names):
        return state  # the prefixes are all that tells two names apart
    for kind in (*kinds, "sent"):
        state[kind] = {names.get(name, name): tensor for name, tensor in state[kind].items()}
    if state["fragments"] is not None:
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


@dataclass(frozen=True)
class _ElasticValues:
    """The plain values of a replica among others that come and go, but for its run; lists are by fragment."""

    slot: Count
    rounds: list[Count]
    num_steps: Count
    tokens: Count
    bytes_sent: Count
    bytes_received: Count
    blocked_seconds: Seconds
    last_sent: list[Count]
    next_send: list[Count]
    counted: list[tuple[Count, Count]]


def elastic_values_checked(state: Mapping[str, Any], *, num_fragments: int) -> dict[str, Any]:
    """The plain values of the state of a replica among others that come and go.

    Raises:
        UserError: if one is absent or of another type, or a list has another length than there are fragments.
    """
    values = {f.name: state[f.name] for f in fields(_ElasticValues) if f.name in state}
    try:
        checked = vars(converted(values, _ElasticValues, source="the state"))
    except FileError as error:
        raise UserError(f"{error}: {_NOT_OURS}") from None
    for name, value in checked.items():
        if isinstance(value, list) and len(value) != num_fragments:
            raise UserError(
                f"the state has {len(value)} values as {name}, and there are {num_fragments} fragments: "
                f"{_NOT_OURS}"
            )
    return checked


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _bare(name: str) -> str:
    """A parameter's name without what torch.compile, FSDP and DDP put into it.

    >>> _bare("module._orig_mod.blocks.0._fsdp_wrapped_module.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("module.")


def refuse_names(verb: Literal["has", "lacks"], names: Iterable[str], kind: str, most: int = 3) -> None:
    """Refuse a state that has these names too many, or too few, if there are any."""
    names = list(names)
    if names:
        more = f" and {len(names) - most} more" if len(names) > most else ""
        which = "which the model does not have" if verb == "has" else "which the engine exchanges"
        raise UserError(
            f"the state {verb} {', '.join(names[:most])}{more} in {kind}, {which}: load a state of the same model"
        )


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
        if local(tensor).shape != local(like).shape:
            raise UserError(
                f"the state's {kind} of {name} is not sharded as the model is: read the state with "
                "torch.distributed.checkpoint.load into this engine, or into its state_dict()"
            )
