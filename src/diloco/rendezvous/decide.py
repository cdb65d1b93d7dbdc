"""The conditions for a replica to write a fragment's next outer entry, and the payloads that it counts."""

from collections.abc import Iterable, Mapping

from diloco.errors import DisagreementError
from diloco.files import sha256
from diloco.rendezvous.entries import Contribution
from diloco.rendezvous.machine import RunState


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

    The entry says what Θ_p is before it, and whoever has another Θ_p ends. So until its patience is over a replica
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
    usable = [here[replica] for replica in sorted(here) if state.refusal(fragment, here[replica]) is None]
    replicas = {contribution.replica for contribution in usable}
    if own not in replicas or state.members[own].left or not state.is_complete:
        return None
    active = state.active
    is_whole = replicas.issuperset(active)
    may_lack_some = state.rules.quorum == "majority"
    is_majority = 2 * len(replicas.intersection(active)) > len(active)
    is_enough = is_whole or (may_lack_some and overlap_over and is_majority)
    newest = state.fragments[fragment].round
    is_confirmed = {own}.issuperset(active) or any(c.base_round == newest and c.replica != own for c in usable)
    if (is_enough and is_confirmed) or (may_lack_some and patience_over):
        return tuple(usable)
    return None


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
    known = {log.round: base} | {log.round - back: past for back, past in enumerate(reversed(log.before), 1)}
    sound = {m: c for m, c in here.items() if known.get(c.base_round, bases[m]) == bases[m]}
    newest = [m for m, c in here.items() if c.base_round == log.round and not state.refusal(fragment, c)]
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

    The order is that of SHA-256(previous, replica): nobody is first twice in a row but by chance. Who comes later
    waits for the earlier ones for a moment and no longer: they may be dead.

    Args:
        previous: SHA-256 of the newest entry, `RunState.previous`.
        replicas: those whose payloads are here.

    >>> turns("00" * 32, [0, 1, 2]), turns("01" * 32, [0, 1, 2])
    ((1, 0, 2), (0, 1, 2))
    """
    return tuple(sorted(replicas, key=lambda replica: (sha256(f"{previous} {replica}".encode()), replica)))
