"""A run at one moment, from the state that its log makes: its replicas, its progress, its traffic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.rendezvous.contract import Form
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.prices import Traffic, exchange
from diloco.rendezvous.state import OuterRef

Standing = Literal["active", "inactive", "left", "replaced"]


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica."""

    number: int
    name: str
    standing: Standing
    """inactive: nobody waits for it; replaced: another took its name or slot, or its key was revoked."""
    slot: int
    """The replica's part of the text."""
    tokens: int
    """Counted tokens, on average over the fragments."""
    steps: int
    """Counted inner steps, on average over the fragments."""
    counted: int
    """Number of the last outer steps in which it was."""
    staleness: float | None
    """Rounds between the base of its payloads and the Θ that they updated, on average over the last ones."""
    lag: int
    """Outer steps since it was last in one, or joined."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run: its replicas and fragments."""

    entries: int
    outer_steps: int
    rounds: tuple[int, ...]
    """Outer steps of each fragment."""
    tokens: int
    """Counted tokens, on average over the fragments."""
    steps: int
    """Counted inner steps of all replicas, on average over the fragments."""
    finished: bool
    """Whether the token budget is spent."""
    replicas: tuple[ReplicaStatus, ...]
    last: int
    """Number of outer steps over which averages are taken: the last ones."""
    contributors: float
    """Replicas in an outer step, on average over the last ones."""
    traffic: Traffic
    """Estimated traffic so far, looks for something new left out."""

    @property
    def num_active(self) -> int:
        """Replicas that decisions wait for."""
        return sum(replica.standing == "active" for replica in self.replicas)


def status_of(state: RunState, form: Form, *, num_slots: int) -> RunStatus:
    """The status after a state.

    Args:
        state: of the log.
        form: of the run's payloads.
        num_slots: vectors that the outer rule keeps beside Θ.
    """
    num_fragments = len(state.fragments)
    refs = sorted((ref for log in state.fragments for ref in log.since), key=lambda ref: ref.number)
    last = refs[-4 * num_fragments :]
    return RunStatus(
        entries=state.number,
        outer_steps=state.num_outer,
        rounds=tuple(log.round for log in state.fragments),
        tokens=state.tokens // num_fragments,
        steps=sum(member.steps for member in state.members) // num_fragments,
        finished=state.finished,
        replicas=tuple(_replica(state, number, last) for number in range(len(state.members))),
        last=len(last),
        contributors=sum(len(ref.body.contributions) for ref in last) / max(1, len(last)),
        traffic=_traffic(state, form, num_slots),
    )


def _replica(state: RunState, number: int, last: Sequence[OuterRef]) -> ReplicaStatus:
    member, num_fragments = state.members[number], len(state.fragments)
    standing: Standing = "active" if state.is_active(number) else "inactive"
    standing = "replaced" if member.fenced else "left" if member.left else standing
    stale = [
        ref.body.round - 1 - counted.base_round
        for ref in last
        for counted in ref.body.contributions
        if counted.replica == number
    ]
    return ReplicaStatus(
        number=number,
        name=member.name,
        standing=standing,
        slot=member.slot,
        tokens=member.tokens // num_fragments,
        steps=member.steps // num_fragments,
        counted=len(stale),
        staleness=sum(stale) / len(stale) if stale else None,
        lag=state.num_outer - member.last_outer,
    )


def _traffic(state: RunState, form: Form, num_slots: int) -> Traffic:
    """The traffic so far, as if the replicas that are active now had read everything."""
    newest = [
        max((log.last_seq.get(r, -1) for log in state.fragments), default=-1) for r in range(len(state.members))
    ]
    num_payloads, num_active = sum(seq + 1 for seq in newest), len(state.active)
    fragments, num_shares = range(len(form.sizes)), form.num_shares
    payload_bytes = num_shares * sum(map(form.share_bytes, fragments)) / len(fragments)
    average_bytes = num_shares * sum(map(form.average_bytes, fragments)) / len(fragments)
    every = state.rules.snapshot_rounds
    snapshots = [max(0, log.round - 1) // every for log in state.fragments]
    snapshot_bytes = sum(
        count * 4 * size * (1 + num_slots) for count, size in zip(snapshots, form.sizes, strict=True)
    )
    steps = exchange(
        num_replicas=num_active,
        num_payloads=num_payloads,
        num_steps=state.num_outer,
        payload_bytes=payload_bytes,
        average_bytes=average_bytes,
        num_shares=num_shares,
    )
    num_other_entries = state.number - state.num_outer
    return Traffic(
        creates=steps.creates + num_other_entries + sum(snapshots),
        gets=steps.gets + num_active * num_other_entries,
        bytes_up=steps.bytes_up + snapshot_bytes,
        bytes_down=steps.bytes_down,
    )
