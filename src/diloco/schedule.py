"""The fragments that replica m sends and merges at step t: one pure function of (t, m)."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, NamedTuple

from diloco.errors import UserError


class Sync(NamedTuple):
    """One exchange of one fragment."""

    fragment: int
    """Index of the fragment, from 0."""
    round: int
    """The number of this exchange among its fragment's, from 1."""
    step: int
    """The inner step after which it is sent."""


class Due(NamedTuple):
    """The syncs that a replica starts and ends after one inner step: it sends, then merges, in the given order."""

    send: tuple[Sync, ...]
    merge: tuple[Sync, ...]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The settings of a schedule, which a config and a simulation have, too."""

    sync_every: int = field(default=30, metadata={"planned": True, "column": True})
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int | tuple[int, ...] | None = field(
        default=None, metadata={"planned": True, "own_with_rendezvous": True}
    )
    """τ: inner steps between sending a fragment and merging it, one number or one per replica; None is the
    method's own, and 0 where there is no method."""
    offsets: tuple[int, ...] | None = field(default=None, metadata={"planned": True})
    """t_p, one per fragment; None is floor(p·H/P)."""
    first_sync: Literal["full_period", "early"] = "full_period"
    """First sync of a fragment: full_period is the first due step t ≥ H; early, the first due step t ≥ 1."""

    def schedule(self, num_fragments: int) -> "Schedule":
        """The schedule of so many fragments.

        Raises:
            UserError: as `Schedule`.
        """
        return Schedule(num_fragments=num_fragments, **{f.name: getattr(self, f.name) for f in fields(Timing)})

    @property
    def overlaps(self) -> tuple[int, ...]:
        """τ_m of each replica, or the one number of all."""
        tau = 0 if self.overlap_steps is None else self.overlap_steps
        return tau if isinstance(tau, tuple) else (tau,)

    @property
    def max_overlap(self) -> int:
        """The largest τ of any replica: how long a payload that was sent may still be needed."""
        return max(self.overlaps)

    def check_replicas(self, num_replicas: int | None) -> None:
        """Refuse a τ per replica where there is another number of replicas, or None: they come and go.

        Raises:
            UserError: naming both.
        """
        if isinstance(self.overlap_steps, tuple) and num_replicas is None:
            raise UserError(
                f"overlap_steps={self.overlap_steps} with replicas that come and go: give each replica its own "
                "number",
                "overlap_steps",
            )
        if isinstance(self.overlap_steps, tuple) and len(self.overlap_steps) != num_replicas:
            raise UserError(
                f"overlap_steps={self.overlap_steps} must hold one number for each of {num_replicas} replicas",
                "overlap_steps",
            )


@dataclass(frozen=True, kw_only=True)
class Schedule(Timing):
    """The steps at which each fragment is sent and merged (Streaming DiLoCo, arXiv 2501.18512, Algorithm 1).

    Steps t are counted from 1. Fragment p is sent after step t when t ≥ H and (t − t_p) mod H = 0, and replica
    m merges it after step t + τ_m.

    Raises:
        UserError: if a field is out of its range, or two contradict each other.

    >>> schedule = Schedule(sync_every=100, num_fragments=2, overlap_steps=1)
    >>> [t for t in range(1, 301) if schedule.due(t).send]
    [100, 150, 200, 250, 300]
    >>> schedule.due(151).merge
    (Sync(fragment=1, round=1, step=150),)
    """

    sync_every: int = field()
    num_fragments: int
    """P: all fragments, the one outside the blocks included."""

    def __post_init__(self) -> None:
        if self.overlap_steps is None:  # there is no method
            object.__setattr__(self, "overlap_steps", 0)
        self._check_types()
        for name in ("sync_every", "num_fragments"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1", name)
        overlaps = self.overlaps
        if not overlaps or not all(0 <= overlap < self.sync_every for overlap in overlaps):
            raise UserError(
                f"overlap_steps={self.overlap_steps} must be at least 0 and below sync_every={self.sync_every}: "
                "a fragment is merged before it is sent again",
                "overlap_steps",
                "sync_every",
            )
        if self.offsets is not None:
            if len(self.offsets) != self.num_fragments:
                raise UserError(
                    f"offsets={self.offsets} must hold one step for each of num_fragments={self.num_fragments}",
                    "offsets",
                    "num_fragments",
                )
            if not all(0 <= offset < self.sync_every for offset in self.offsets):
                raise UserError(
                    f"offsets={self.offsets} must each be at least 0 and below sync_every={self.sync_every}",
                    "offsets",
                    "sync_every",
                )
        if self.first_sync not in ("full_period", "early"):
            raise UserError(f"first_sync={self.first_sync} must be full_period or early", "first_sync")

    def _check_types(self) -> None:
        numbers = {
            "sync_every": (self.sync_every,),
            "num_fragments": (self.num_fragments,),
            "overlap_steps": self.overlaps,
            "offsets": () if self.offsets is None else self.offsets,
        }
        for name, value in numbers.items():
            if not (isinstance(value, tuple) and all(isinstance(number, int) for number in value)):
                raise UserError(f"{name}={getattr(self, name)} must be a whole number, or a tuple of them", name)

    def facts(self, num_replicas: int | None = None) -> dict[str, object]:
        """The schedule by name, as replicas compare it; without τ where replicas come and go."""
        overlaps = None if num_replicas is None else [self.overlap(replica) for replica in range(num_replicas)]
        return {
            "sync_every": self.sync_every,
            "num_fragments": self.num_fragments,
            **({} if overlaps is None else {"overlap_steps": overlaps}),
            "offsets": [self.offset(fragment) for fragment in range(self.num_fragments)],
            "first_sync": self.first_sync,
        }

    def offset(self, fragment: int) -> int:
        """t_p of a fragment."""
        if self.offsets is not None:
            return self.offsets[fragment]
        return fragment * self.sync_every // self.num_fragments

    def send_step(self, fragment: int, round: int = 1) -> int:
        """The step after which a fragment is sent for the `round`-th time."""
        offset, period = self.offset(fragment), self.sync_every
        first = period + offset if self.first_sync == "full_period" else offset or period
        return first + (round - 1) * period

    def num_sent(self, fragment: int, step: int) -> int:
        """The number of times that a fragment is sent up to a step."""
        elapsed = step - self.send_step(fragment)
        return 1 + elapsed // self.sync_every if elapsed >= 0 else 0

    def overlap(self, replica: int) -> int:
        """τ_m of a replica."""
        return self.overlaps[replica] if isinstance(self.overlap_steps, tuple) else self.overlaps[0]

    def sent(self, step: int) -> tuple[Sync, ...]:
        """The fragments that are sent after a step, in the order of their indices."""
        syncs = []
        for fragment in self._fragments_at.get(step % self.sync_every, ()):
            elapsed = step - self.send_step(fragment)
            if elapsed >= 0:
                syncs.append(Sync(fragment, 1 + elapsed // self.sync_every, step))
        return tuple(syncs)

    def due(self, step: int, replica: int = 0) -> Due:
        """The syncs that `replica` sends and merges after `step`."""
        return Due(send=self.sent(step), merge=self.sent(step - self.overlap(replica)))

    def next_sent(self, step: int) -> tuple[int, ...]:
        """The fragments of the next sending, after `step` or a later step.

        >>> schedule = Schedule(sync_every=100, num_fragments=2)
        >>> schedule.next_sent(100), schedule.next_sent(101)
        ((0,), (1,))
        """
        first = [self.send_step(fragment) for fragment in range(self.num_fragments)]
        following = [max(s, s - (s - step) // self.sync_every * self.sync_every) for s in first]
        return tuple(p for p, next_step in enumerate(following) if next_step == min(following))

    @cached_property
    def _fragments_at(self) -> dict[int, tuple[int, ...]]:
        """The fragments by t mod H, so that a step without a sync costs one look-up."""
        at: dict[int, tuple[int, ...]] = {}
        for fragment in range(self.num_fragments):
            offset = self.offset(fragment)
            at[offset] = (*at.get(offset, ()), fragment)
        return at


def least_steps(sync_every: int) -> int:
    """Inner steps after which a replica that others wait for offers a fragment early, in a run of a rendezvous."""
    return max(1, sync_every // 4)


SYNC_EVERY, OVERLAP_STEPS = 100, 5
"""H and τ where the engine is given neither them nor a schedule."""


def schedule_of(
    num_fragments: int,
    *,
    schedule: Schedule | None,
    sync_every: int | None,
    overlap_steps: int | tuple[int, ...] | None,
) -> Schedule:
    """The schedule, or one of H and τ; what is None of these two is the engine's own.

    Raises:
        UserError: as `Schedule`, and if a schedule is given beside H or τ.
    """
    if schedule is not None:
        for name, value in {"sync_every": sync_every, "overlap_steps": overlap_steps}.items():
            if value is not None:
                raise UserError(f"{name}={value} and schedule={schedule}: pass one of the two", name, "schedule")
        return schedule
    sync_every = SYNC_EVERY if sync_every is None else sync_every
    if overlap_steps is None and isinstance(sync_every, int) and 0 < sync_every <= OVERLAP_STEPS:
        raise UserError(
            f"sync_every={sync_every} must be above overlap_steps, which is {OVERLAP_STEPS} where it is left out: "
            f"pass overlap_steps from 0 to {sync_every - 1}, too",
            *("sync_every", "overlap_steps"),
        )
    overlap_steps = OVERLAP_STEPS if overlap_steps is None else overlap_steps
    return Schedule(sync_every=sync_every, num_fragments=num_fragments, overlap_steps=overlap_steps)
