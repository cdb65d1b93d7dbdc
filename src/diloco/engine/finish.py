"""The end of a run: everything in flight is merged, and what was never sent is sent or named."""

import warnings

from diloco.engine.replica_rounds import ReplicaRounds
from diloco.engine.rounds import Rounds
from diloco.exchange.control import agree
from diloco.outer.step import OuterStep
from diloco.schedule import Sync


def finish(rounds: Rounds, *, flush: bool) -> tuple[OuterStep, ...]:
    """Receive what is in flight and merge it, in order.

    Args:
        rounds: the engine's.
        flush: send and merge every fragment once more that was not sent after the last inner step, one at a time.

    Raises:
        DisagreementError: if the replicas have taken different numbers of steps, or only some of them flush.
    """
    schedule, step = rounds.settings.schedule, rounds.num_steps
    fragments = [p for p, last_sent in enumerate(rounds.last_sent) if flush and last_sent < step]
    facts = {"number of inner steps at finish()": step, "fragments that finish() flushes": fragments}
    agree(rounds.transport, facts)
    first_step = step - schedule.overlap(rounds.transport.replica) + 1
    due = [flight.sync for flight in rounds.in_flight if flight.sync.step >= first_step]
    merged = rounds.merge(due, forget=step)
    for p in fragments:
        # The number of its next round: rounds in flight together have different ones.
        sync = Sync(p, schedule.num_sent(p, step) + 1, step)
        rounds.send((sync,))
        merged += rounds.merge((sync,), forget=step)
    return merged


def warn_of_unsent(rounds: ReplicaRounds) -> None:
    """Name the fragments that were never sent; the warning points to the caller's caller."""
    unsent = [p for p in range(len(rounds.last_sent)) if rounds.is_initial(p)]
    if unsent and rounds.num_steps:
        names = ", ".join(
            f"fragment {p} ({rounds.settings.fragments[p].parameters[0]}, …) was never sent" for p in unsent
        )
        warnings.warn(
            f"after {rounds.num_steps} inner steps {names}, and its outer parameters are the initial ones: call "
            "finish(flush=True), or choose a smaller sync_every",
            stacklevel=3,
        )


def warn_of_uncounted(rounds: ReplicaRounds) -> None:
    """Name the fragments whose last work no outer step has counted; the warning points to the caller's caller."""
    fragments = [p for p in range(len(rounds.last_sent)) if rounds.has_uncounted(p)]
    if fragments:
        warnings.warn(
            f"the outer parameters lack this replica's last work on fragments {fragments}: its payloads were more "
            "than max_stale outer steps late, or left out for their norms; call finish(flush=True) again",
            stacklevel=3,
        )
