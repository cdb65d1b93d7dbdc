"""The engine's state as plain values and tensors by parameter name, what is in flight included."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from diloco.engine.rounds import Rounds
from diloco.reduction import reduction_of
from diloco.schedule import Sync
from diloco.wire import codec


def state_of(rounds: Rounds) -> dict[str, Any]:
    """The state: keys and shapes are the same whatever is in flight, and Θ and the slots are the engine's own."""
    parameters, settings = rounds.parameters, rounds.settings
    tensors = {kind: parameters.all_named(rounds.state.at_home(kind)) for kind in rounds.state.kinds}
    return {
        **settings.facts_of_state(rounds.transport.replica, rounds.transport.num_replicas),
        "fragments": [list(fragment.parameters) for fragment in settings.fragments],
        "last_sent": list(rounds.last_sent),
        "num_steps": rounds.num_steps,
        "drained_step": rounds.drained_step,
        "tokens": int(rounds.tokens),
        "bytes_sent": rounds.bytes_sent,
        "bytes_received": rounds.bytes_received,
        "blocked_seconds": rounds.blocked_seconds,
        **tensors,
        "in_flight": [list(flight.sync) for flight in rounds.in_flight],
        "sent": parameters.all_named(rounds.sent()),
    }


def load(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """Take up a state, and send again what was in flight.

    Args:
        rounds: the engine's.
        state: one that `loadable` gave.
    """
    rounds.num_steps, rounds.last_sent = state["num_steps"], list(state["last_sent"])
    rounds.tokens = state.get("tokens", 0)
    rounds.bytes_sent, rounds.bytes_received = state["bytes_sent"], state["bytes_received"]
    rounds.blocked_seconds = state["blocked_seconds"]
    for kind in rounds.state.kinds:
        for fragment, flat_N in enumerate(rounds.state.at_home(kind)):
            flat_N.copy_(rounds.parameters.flat_of(fragment, state[kind]))
    rounds.in_flight = []
    # In fp32, since what was sent is rounded already: so the state may be cut into other shards.
    again = reduction_of(rounds.settings.reduction.spec, codec("fp32"))
    for sync in (Sync(*values) for values in state["in_flight"]):
        sent_N = rounds.parameters.flat_of(sync.fragment, state["sent"]).to(rounds.sent_from)
        payloads = again.encode(sent_N, rounds.key(sync), rounds.cohort)
        rounds.start(sync, again, partial(tuple, payloads))
    # With nothing in flight nothing is left to merge, whatever another schedule would have sent.
    rounds.drained_step = state["drained_step"] if state["in_flight"] else rounds.num_steps
