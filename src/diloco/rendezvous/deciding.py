"""The decision of an outer step: when, and with which payloads. Waits are bounded, but with a number as quorum.

With the quorum `majority` a replica writes the outer entry of a fragment

- at once, if the payloads of all active replicas are here, another's against the same newest Θ_p among them;
- τ inner steps after its own offer and the round's first payload, if the payloads of more than half of the active
  replicas are here, another's against the same newest Θ_p among them;
- `patience` inner steps later with whatever is here, its own alone included.

A bridge writes a shift at once, and its payloads enter no other outer step.

With a number K as quorum, K payloads take the place of more than half. No entry counts fewer, however late, but
where fewer replicas are active, or a replica has said that the token budget is spent. Decoupled DiLoCo (arXiv
2604.21428) waits for more than its quorum as long as that costs no training time. Here this grace is what is
left of τ, which adapts to the pace: τ counts inner steps, and before its end nobody would merge.

A payload that comes later counts in a later round, until it is too old. With the quorum `all` it waits for all of
them, and the training thread's wait is bounded by `timeout_seconds`. One that an entry counts, and that is gone
from the store, is replaced by a newer snapshot (`log_thread.Delivery`).
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco.errors import DisagreementError, ExchangeError
from diloco.files import sha256
from diloco.rendezvous.contract import Offer
from diloco.rendezvous.log.entries import Contribution
from diloco.rendezvous.log.run import RunState, least_payloads

_LOG = logging.getLogger("diloco")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A replica's own timing, and its memory for payloads."""

    poll_seconds: float
    """Time between two looks into the store."""
    memory_bytes: int
    """Size of the others' payloads in memory, and of all values."""
    patience: int
    """Inner steps after t + τ, after which a replica decides with the payloads that are there."""
    drain_seconds: float
    """Seconds after the last inner step, after which a replica decides with the payloads that are there."""
    close_seconds: float
    """Least seconds that a replica with no more inner steps waits for others before it closes the run.

    Half of the time that a decision may take is the most that it waits, also where that is shorter.
    """


class Decider:
    """Decides for one replica which payloads an outer step counts, and when.

    Args:
        own: the replica's number.
        pace: its timing.
    """

    def __init__(self, own: int, pace: Pace) -> None:
        self._own, self._pace = own, pace
        self._could_decide: dict[tuple[int, int], float] = {}
        self._opened: dict[tuple[int, int], int] = {}
        """By fragment and round the inner step at which its first payload was here."""
        self._has_warned = False

    def parts(
        self,
        state: RunState,
        offer: Offer,
        here: Mapping[int, Contribution],
        step: int,
        draining_since: float | None,
    ) -> tuple[Contribution, ...] | None:
        """The contributions of `in_time`, once it is this replica's turn to write; None if it must wait."""
        parts = self.in_time(state, offer, here, step, draining_since)
        return parts if parts is not None and self._is_turn(state, offer.fragment, parts) else None

    def in_time(
        self,
        state: RunState,
        offer: Offer,
        here: Mapping[int, Contribution],
        step: int,
        draining_since: float | None = None,
    ) -> tuple[Contribution, ...] | None:
        """The contributions of the next outer entry of the offer's fragment; None if this replica must wait.

        Args:
            state: after all entries.
            offer: this replica's own.
            here: for each replica its newest payload of the fragment, taken against the run's Θ_p.
            step: inner steps taken.
            draining_since: the time at which the training thread took the last of them; None while it takes more.

        Raises:
            ExchangeError: if no entry can take the own payload, which would stay on its way for ever.
        """
        p, own = offer.fragment, self._own
        if draining_since is None:
            elapsed = step - self._begin(state, offer, here.values(), step) - offer.overlap
            is_over, is_late = elapsed >= 0, elapsed >= self._pace.patience
        else:
            is_over, is_late = True, time.monotonic() > draining_since + self._pace.drain_seconds
        parts = may_decide(state, p, here, own, overlap_over=is_over, patience_over=is_late)
        if parts is None and is_late and own in here and (reason := state.refusal_of_norm(p, here[own].norm)):
            raise ExchangeError(
                f"the run leaves out this replica's outer gradient of fragment {p}: {reason}, which is "
                f"{state.rules.norm_bound:g} times the median; it has gone too far from the others, or its "
                "numbers are wrong: start it again under another name, which begins at the run's outer parameters"
            )
        if parts is None and is_late and state.rules.quorum != "all":
            self._warn(step, p, state.refusal_of_replicas(here))
        return parts

    def _begin(self, state: RunState, offer: Offer, here: Iterable[Contribution], step: int) -> int:
        """The inner step from which τ counts, of an own offer.

        An offer that came too late for its round waits for the next one, whose first payload begins its τ. Without
        this, late replicas would decide as soon as half of the replicas are here, and leave out the other half; in
        the next round the other half would do the same: half of a fleet in turns, twice as often, for ever.
        """
        p, newest = offer.fragment, state.fragments[offer.fragment].newest
        if offer.base_round >= newest or all(c.base_round < newest for c in here):
            return offer.step
        if (p, newest) not in self._opened:
            self._opened = {place: at for place, at in self._opened.items() if place[0] != p} | {(p, newest): step}
        return self._opened[p, newest]

    def _warn(self, step: int, p: int, reason: str | None) -> None:
        """Say once why a quorum K is not reached long after τ."""
        if reason is not None and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "step %d: the outer step of fragment %d waits, as will the others: it %s: start the replicas that "
                "are missing again under their names, or create a run with a smaller quorum",
                *(step, p, reason),
            )

    def _is_turn(self, state: RunState, p: int, parts: Sequence[Contribution]) -> bool:
        """True if the replicas before this one, in an order that changes with each entry, had time to write."""
        since = self._could_decide.setdefault((p, state.fragments[p].round), time.monotonic())
        order = turns(state.previous, (c.replica for c in parts))
        is_turn = time.monotonic() >= since + order.index(self._own) * self._pace.poll_seconds / 2
        if is_turn:
            self._could_decide.clear()
        return is_turn


def may_decide(
    state: RunState,
    fragment: int,
    here: Mapping[int, Contribution],
    own: int,
    *,
    overlap_over: bool,
    patience_over: bool,
) -> tuple[Contribution, ...] | None:
    """The contributions of the fragment's next outer entry, if this replica may write it now; None if not yet.

    The entry names Θ_p before it, and a replica with another Θ_p ends. So until its patience is over, a replica
    writes only if a payload of another one was taken against the same newest Θ_p, or nobody else is active. Where
    its own payload is the only new one, the others write, if they have the same Θ_p.

    Args:
        state: after all entries.
        fragment: p.
        here: for each replica its newest payload of the fragment that was verified here, and taken against the
            run's Θ_p.
        own: this replica.
        overlap_over: whether τ own inner steps have passed since its own send.
        patience_over: whether τ + patience have.
    """
    usable = [
        here[replica]
        for replica in sorted(here)
        if state.refusal(fragment, here[replica]) is None and (replica == own or not state.is_bridge(replica))
    ]
    replicas = {contribution.replica for contribution in usable}
    if own not in replicas or (state.members[own].left and not state.finished) or not state.is_complete:
        return None
    if state.is_bridge(own):
        return (here[own],)
    if state.refusal_of_replicas(replicas):
        return None
    active = state.active
    counted = replicas if isinstance(state.rules.quorum, int) else replicas.intersection(active)
    is_quorum = len(counted) >= least_payloads(state.rules.quorum, len(active), after_patience=False)
    is_enough = replicas.issuperset(active) or (overlap_over and is_quorum)
    newest = state.fragments[fragment].newest
    is_confirmed = {own}.issuperset(active) or any(c.base_round >= newest and c.replica != own for c in usable)
    return tuple(usable) if (is_enough and is_confirmed) or patience_over else None


def of_the_run(
    state: RunState, fragment: int, here: Mapping[int, Contribution], bases: Mapping[int, str], own: int, base: str
) -> dict[int, Contribution]:
    """The payloads of a fragment that were taken against the run's Θ_p of their base round.

    Args:
        state: after all entries, which tell Θ_p up to the last round but one.
        fragment: p.
        here: for each replica its newest payload of the fragment that was verified here.
        bases: the digest of Θ_p in the header of each.
        own: this replica.
        base: the digest of its Θ_p after the newest round.

    Raises:
        DisagreementError: if more replicas have another Θ_p after the newest round than have this replica's own.
    """
    log = state.fragments[fragment]
    known = {log.round: base} | log.bases
    sound = {m: c for m, c in here.items() if known.get(c.base_round, bases[m]) == bases[m]}
    newest = [m for m, c in here.items() if c.base_round >= log.newest and not state.refusal(fragment, c)]
    num_others = sum(replica not in sound for replica in newest)
    if 2 * num_others > len({own, *newest}):
        raise DisagreementError(
            f"the outer parameters of fragment {fragment} after round {log.round} are not those of {num_others} "
            "other replicas: this computer's memory changed, or an outer step gave other bits here; nothing was "
            "written: start this replica again"
        )
    return sound


def turns(previous: str, replicas: Iterable[int]) -> tuple[int, ...]:
    """The replicas which may write the next entry, in the order in which they should try; the same on all.

    The order is that of SHA-256(previous, replica): nobody is first twice in a row but by chance. Later replicas
    wait for earlier ones for a moment and no longer: they may be dead.

    Args:
        previous: SHA-256 of the newest entry, `RunState.previous`.
        replicas: those whose payloads are here.

    >>> turns("00" * 32, [0, 1, 2]), turns("01" * 32, [0, 1, 2])
    ((1, 0, 2), (0, 1, 2))
    """
    return tuple(sorted(replicas, key=lambda replica: (sha256(f"{previous} {replica}".encode()), replica)))
