"""The engine's state as plain values and tensors by parameter name, what is in flight included."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.engine.rounds import Rounds
from diloco.errors import DisagreementError, UserError
from diloco.exchange.control import agree
from diloco.kernels.memory import empty
from diloco.reduction import reduction_of
from diloco.schedule import Sync
from diloco.wire import codec


def state_of(rounds: Rounds, drained_step: int, sent: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """The state; its tensors are views of the engine's own where they can be, and `sent` may be given."""
    tensors = {kind: rounds.parameters.all_named(rounds.state.at_home(kind)) for kind in rounds.state.kinds}
    return {
        **_facts(rounds),
        "num_steps": rounds.num_steps,
        "drained_step": drained_step,
        "bytes_sent": rounds.bytes_sent,
        "bytes_received": rounds.bytes_received,
        "blocked_seconds": rounds.blocked_seconds,
        **tensors,
        "in_flight": [list(flight.sync) for flight in rounds.in_flight],
        "sent": rounds.sent() if sent is None else sent,
    }


def load(rounds: Rounds, state: Mapping[str, Any]) -> int:
    """Take up a state, and send again what was in flight.

    Args:
        rounds: the engine's.
        state: one that `agree_to_load` took.

    Returns:
        The step up to which everything that was sent has been merged.
    """
    rounds.num_steps = state["num_steps"]
    rounds.bytes_sent, rounds.bytes_received = state["bytes_sent"], state["bytes_received"]
    rounds.blocked_seconds = state["blocked_seconds"]
    for kind in rounds.state.kinds:
        for fragment, flat_N in enumerate(rounds.state.at_home(kind)):
            flat_N.copy_(rounds.parameters.flat_of(fragment, state[kind]))
    rounds.in_flight = []
    # In fp32, since what was sent is rounded already: so the state may be cut into other shards.
    again = reduction_of(rounds.settings.reduction.spec, codec("fp32"))
    for sync in (Sync(*values) for values in state["in_flight"]):
        sent_N = rounds.parameters.flat_of(sync.fragment, state["sent"])
        rounds.start(sync, again, again.encode(sent_N, rounds.key(sync), rounds.cohort))
    # With nothing in flight nothing is left to merge, whatever another schedule would have sent.
    return state["drained_step"] if state["in_flight"] else rounds.num_steps


def room_for_sent(rounds: Rounds, in_flight: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Zeros for the `sent` of a saved state, sharded as the parameters are now."""
    room: dict[str, Tensor] = {}
    for fragment in {fragment for fragment, *_ in in_flight}:
        num_elements, device = rounds.state.num_elements(fragment), rounds.parameters.device
        room |= rounds.parameters.named(fragment, empty(num_elements, torch.float32, device).zero_())
    return room


def agree_to_load(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """Refuse a state on all replicas, or on none, before anything is changed.

    Raises:
        DisagreementError: if the replicas load different states.
        UserError: if the state does not belong to this engine.
    """
    refusal = _refusal(rounds, state)
    flying = {"in flight in the loaded state (fragment, round, step)": state["in_flight"]}
    loaded = {"why the state can't be loaded": refusal, "step of the loaded state": state["num_steps"]}
    try:
        agree(rounds.transport, loaded | flying)
    except DisagreementError:
        if refusal is None:
            raise
    if refusal is not None:
        raise UserError(refusal)


def _refusal(rounds: Rounds, state: Mapping[str, Any]) -> str | None:
    """Why a state can't be loaded here, in a sentence."""
    mine = _facts(rounds)
    if not state["in_flight"]:
        del mine["schedule"], mine["own_overlap_steps"]
        if rounds.settings.error_feedback is None and rounds.settings.outer.shared:
            del mine["replica"]
    for name, value in mine.items():
        if state.get(name) != value and (name in state or name not in _NOT_IN_OLDER_STATES):
            return (
                f"the state was saved with {name}={state.get(name)}, and this engine has {value}: "
                "load it into an engine with the settings of the one that saved it"
            )
    return None


_NOT_IN_OLDER_STATES = ("replica", "outer_rule")


def _facts(rounds: Rounds) -> dict[str, object]:
    return rounds.settings.facts_of_state(rounds.transport.replica, rounds.transport.num_replicas)
