"""A bridge: it makes one run, a region, a replica of an outer run of several regions.

A region is a run in a store of its own: its replicas average, and its Θ_r moves by its log. The outer run lies in
another store. Its replicas are bridges, one per region, which train nothing. For each fragment p a bridge has θ_p,
the region's place in the outer run:

    θ_p ← Θ_r,p                            as the region goes on, unless an outer gradient of p is on its way
    Δ_p = Θ_p − θ_p                        sent every H outer steps of the region
    Θ_p ← OuterOpt(Θ_p, Δ_p)               over regions; if it counts Δ_p, θ_p ← Θ_p, else θ_p moves as Θ_p does
    Θ_r,p ← Θ_r,p + decode(encode(s_p))    s_p, by which θ_p has moved there: a shift, an entry of the region's log

The region goes on meanwhile, and a shift leaves what it has learnt: the θ of its replicas move as Θ_r does. What
the codec loses of s_p stays in Θ_p − Θ_r,p, and is in the next outer gradient.

Before each outer gradient and each shift the bridge writes a note of the fragment. A bridge that is started again
compares the notes with both logs and goes on: nothing counts twice, and nothing is lost.

Shapes: N elements of one fragment.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diloco.engine.elastic import ElasticMembership
from diloco.engine.outer_state import OUTER
from diloco.engine.parameters import FragmentParameters, fill
from diloco.engine.replica import Replica, outer_state
from diloco.errors import ExchangeError, FileError, UserError
from diloco.files import make_directory, reading, requiring, write_atomically
from diloco.outer.merge import MergeRule
from diloco.outer.step import OuterStep
from diloco.rendezvous.contract import Decision, Rendezvous
from diloco.rendezvous.log.entries import Create, LogError
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.replay import Replay, replayed
from diloco.rendezvous.status import Look
from diloco.rendezvous.store_rendezvous import StoreRendezvous
from diloco.schema import Count, decoded
from diloco.training.config.config import DilocoConfig, ElasticConfig, TrainConfig, is_within
from diloco.training.config.engine_settings import engine_settings
from diloco.training.config.joined import config_of, create_of, known
from diloco.training.config.resolve import TOKENIZER_DIGEST, facts_with_rendezvous
from diloco.training.records.store_runs import initial_parameters
from diloco.training.stopping import stoppable
from diloco.training.world import leaving

with requiring("tyro", extra="train"):
    import tyro

_LOG = logging.getLogger("diloco")
_PAUSE_SECONDS = 0.05
"""Time between two looks at what the threads of the two logs have read."""
_ROUNDS_APART = 4
"""Rounds of a region between two of its outer gradients of a fragment, where nobody sets sync_every."""
_SHARED = ("model", "seed", "sequence_length", "num_tokens", "global_batch", "diloco")
"""The trainer's settings that the outer run's entry 0 has."""


@dataclass(frozen=True, kw_only=True)
class _Note:
    """The facts about a fragment before an outer gradient or a shift of it."""

    runs: tuple[str, str]
    """The outer run and the region, by the SHA-256 of their entries 0."""
    slot: Count
    """The bridge's in the outer run."""
    round: Count
    """The outer run's round after which Θ_p is in the note."""
    counted: tuple[Count, Count]
    """Tokens and outer steps of the region up to the last outer gradient that was counted."""
    sent: tuple[Count, Count] | None
    """The same of the one on its way; None if none is."""
    num_shifts: Count
    """Shifts of the fragment in the region."""


class OuterRun(ElasticMembership):
    """The bridge in the outer run, where it is a replica.

    Args:
        replica: with θ.
        rendezvous: of the outer run.
        before_send: is called before a fragment is sent.
    """

    waits_for_all = False  # its region goes on, and a bridge may come back at any place of the schedule

    def __init__(self, replica: Replica, rendezvous: Rendezvous, before_send: Callable[[int], None]) -> None:
        self.moved: dict[int, Tensor] = {}
        """For each fragment s_p: the part of θ from outer steps that no shift gave the region; flat FP32 (N)."""
        self._before_send = before_send
        super().__init__(replica, rendezvous)
        self.moved.clear()  # the region has nothing of the Θ that a joiner begins with

    def send(self, p: int) -> None:
        """Encode a fragment's outer gradient and offer it."""
        self._before_send(p)
        super().send(p)

    def _take(self, decision: Decision, merge_rule: MergeRule) -> OuterStep:
        p, before_N = decision.fragment, self.replica.parameters.flat(decision.fragment)
        outer_step = super()._take(decision, merge_rule)
        move_N = self.replica.parameters.flat(p) - before_N
        self.moved[p] = self.moved[p] + move_N if p in self.moved else move_N
        return outer_step

    def begin(self, p: int, counted: tuple[int, int]) -> None:
        """Go on from what was counted, at the next step at which a fragment is due by the schedule."""
        steps = self.replica.num_steps
        # After long the run would refuse all that was not counted.
        self.counted[p] = counted[0], max(counted[1], steps - self.joined.most_steps)
        behind = max(0, steps - self._next_send[p])
        self._next_send[p] += -(-behind // self._sync_every) * self._sync_every


class Region(ElasticMembership):
    """The bridge in its region, where its outer gradients are shifts."""

    rendezvous: StoreRendezvous  # pyrefly: ignore[bad-override-mutable-attribute]

    @property
    def run(self) -> str:
        """SHA-256 of the log's entry 0."""
        return self.joined.run

    @property
    def state(self) -> RunState:
        """The state that the log makes."""
        return self.rendezvous.state

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens, on average over the fragments, and outer steps of the region that Θ_r has taken."""
        tokens, num_outer = self.rendezvous.counted
        return tokens // len(self.rounds), num_outer

    @property
    def is_closed(self) -> bool:
        """True once the run is over, and Θ_r its last."""
        return self.rendezvous.is_closed

    def vector(self, p: int) -> Tensor:
        """Θ_r,p, flat FP32 (N)."""
        return self.replica.state.use(OUTER, p)

    def shift(self, p: int, move_N: Tensor) -> bool:
        """Move Θ_r,p, and wait for that, bounded in time; False if the run was closed before."""
        before = num_shifts(self, p)
        self.replica.num_steps += 1  # a shift claims a step and a token, which nobody counts
        self.replica.tokens += 1
        fill(self.replica.parameters.theta(p), self.vector(p) + move_N)
        self.send(p)
        self._errors[p] = None  # what the codec loses is in the next outer gradient
        self.take_decided(wait=True)
        return num_shifts(self, p) > before

    def _give_up_before(self, p: int, oldest_base: int) -> None:
        """Keep a shift on its way: it moves Θ as far whatever Θ it meets."""


class ClosedRegion:
    """A region whose run is over, from its log: there is nothing more to shift.

    Args:
        replay: of its run.
        vectors: Θ_r by fragment, flat FP32 (N).
    """

    is_closed = True

    def __init__(self, replay: Replay, vectors: Sequence[Tensor]) -> None:
        self.state, self.rounds = replay.state, [log.round for log in replay.state.fragments]
        self.run, self.vector = replay.state.run, vectors.__getitem__
        self.progress = replay.state.tokens // len(vectors), replay.state.num_outer


def num_shifts(region: Region | ClosedRegion, p: int) -> int:
    """The shifts of a fragment so far; all are the bridge's."""
    return region.state.fragments[p].num_shifts


class Bridge:
    """One region in an outer run.

    Args:
        region: the bridge there.
        replica: with θ and Θ as they were before the first step of both runs.
        rendezvous: of the outer run, which it joins.
        directory: of its notes.

    Raises:
        DisagreementError: if the outer run has other settings or initial parameters.
        UserError: if the notes are of other runs.
        FileError: if one can't be read.
    """

    def __init__(
        self, region: Region | ClosedRegion, replica: Replica, rendezvous: StoreRendezvous, directory: Path
    ) -> None:
        self.region, self._rendezvous, self._directory = region, rendezvous, directory
        make_directory(directory)
        fragments = range(len(region.rounds))
        initial = [replica.parameters.flat(p) for p in fragments]
        self.outer = OuterRun(replica, rendezvous, partial(self._note, is_sending=True))
        self._seen = [-1] * len(fragments)
        """The region's rounds that are in θ; −1 if θ is another's."""
        self._count()
        for p in fragments:
            self._resume(p, initial[p])
        self._shift()

    def step(self) -> tuple[OuterStep, ...]:
        """Take what both runs have decided, and send what is due; returns the outer run's outer steps."""
        if isinstance(self.region, Region):
            self._check(self.region)
            self.region.take_decided(wait=False)
        self._check(self.outer)
        self._count()
        self._follow()
        if not self.outer.look():
            return ()
        self.outer.replica.parameters.watch.merges.clear()  # no optimizer is here that could undo one
        outer_steps = self.outer.advance()
        self._shift()
        return outer_steps

    def finish(self) -> None:
        """Send what is not counted, leave the outer run, and close it if all others have left; bounded in time."""
        self._count()
        self.outer.finish(flush=False, close=False)
        self._follow()  # what the region has learnt while these were on their way
        self.outer.finish(flush=True, close=False)
        self.outer.joined.seat.close(if_last=True)
        deadline = time.monotonic() + self._rendezvous.timeout_seconds
        while not self._has_ended() and time.monotonic() < deadline:
            self._check(self.outer)
            self.outer.take_decided(wait=False)
            time.sleep(_PAUSE_SECONDS)

    def _has_ended(self) -> bool:
        """True once this bridge has left the outer run, and the run is closed if it was the last."""
        state = self._rendezvous.state
        return state.members[self._rendezvous.replica].left and bool(state.present or self._rendezvous.is_closed)

    def _check(self, membership: ElasticMembership) -> None:
        if (failure := membership.failure) is not None:
            raise ExchangeError(failure)

    def _count(self) -> None:
        """Count the region's outer steps as inner steps of the outer run."""
        replica, (tokens, num_outer) = self.outer.replica, self.region.progress
        replica.num_steps, replica.tokens = max(replica.num_steps, num_outer), max(replica.tokens, tokens)

    def _follow(self) -> None:
        """θ_p ← Θ_r,p + s_p, where no outer gradient of p is on its way."""
        for p, last_round in enumerate(self.region.rounds):
            if p in self.outer.in_flight:
                self._seen[p] = -1
            elif self._seen[p] != last_round or p in self.outer.moved:
                fill(self.outer.replica.parameters.theta(p), self.region.vector(p) + self.outer.moved.get(p, 0))
                self._seen[p] = last_round

    def _shift(self) -> None:
        """Let the region take by what the outer steps have moved θ."""
        for p, move_N in [*self.outer.moved.items()]:
            self._note(p)
            has_moved = bool(move_N.any())
            if not has_moved or (isinstance(self.region, Region) and self.region.shift(p, move_N)):
                del self.outer.moved[p]
                self._seen[p] = -1

    def _path(self, p: int) -> Path:
        return self._directory / f"{p}.safetensors"

    def _note(self, p: int, *, is_sending: bool = False) -> None:
        """Write what a bridge needs that goes on after the fragment's next outer gradient or shift."""
        outer, region = self.outer, self.region
        replica, offer = outer.replica, outer.in_flight.get(p)
        sent = (replica.tokens, replica.num_steps) if is_sending else None
        if offer is not None:
            sent = (outer.counted[p][0] + offer.tokens, offer.step)
        note = _Note(
            runs=(outer.joined.run, region.run),
            slot=outer.joined.slot,
            round=outer.rounds[p],
            counted=outer.counted[p],
            sent=sent,
            num_shifts=num_shifts(region, p),
        )
        tensors = {"outer": replica.state.use(OUTER, p), "theta": replica.parameters.flat(p)}
        if p in outer.moved:
            tensors["move"] = outer.moved[p]
        write_atomically(self._path(p), [save(tensors, {_NOTE: msgspec.json.encode(note).decode()})])

    def _resume(self, p: int, initial_N: Tensor) -> None:
        """Find by what the region's Θ_p has still to move, and what of its work was counted."""
        outer, region = self.outer, self.region
        counted_round, now_N = outer.joined.slot_rounds[p], outer.replica.state.use(OUTER, p)
        counted = outer.replica.tokens, outer.replica.num_steps
        note, tensors = self._read(p)
        is_new = note is None and not counted_round and not num_shifts(region, p)
        is_counted = note is not None and counted_round > note.round
        if is_new:
            move_N, counted = now_N - initial_N, (0, 0)
        elif note is None or note.slot != outer.joined.slot or (is_counted and not note.sent):
            _LOG.warning(
                "%s does not tell what of fragment %d was sent: its region takes the outer run's parameters, and "
                "what it alone has learnt of it is lost",
                *(self._path(p), p),
            )
            move_N = now_N - region.vector(p)
        else:
            move_N = now_N - tensors["theta" if is_counted else "outer"]
            if "move" in tensors and num_shifts(region, p) == note.num_shifts:
                move_N = move_N + tensors["move"]
            counted = note.sent if is_counted and note.sent else note.counted
        outer.moved[p] = move_N
        outer.begin(p, counted)

    def _read(self, p: int) -> tuple[_Note | None, dict[str, Tensor]]:
        """The newest note of a fragment, and its vectors; none if there is none."""
        path = self._path(p)
        if not path.exists():
            return None, {}
        try:
            with reading(path), safe_open(path, framework="pt") as file:
                note = decoded((file.metadata() or {}).get(_NOTE, ""), _Note, source=str(path))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        except SafetensorError as error:
            raise FileError(f"{path} can't be read: {error}") from error
        sizes = {tensor.shape for tensor in tensors.values()}
        if note.runs != (self.outer.joined.run, self.region.run) or sizes != {self.region.vector(p).shape}:
            raise UserError(f"{path} is the note of a bridge between other runs: choose another directory", "runs")
        return note, tensors


_NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """The settings of a bridge; its name is in the region's entry 0."""

    region: tyro.conf.Positional[str]
    """Store of the region's run, which names its bridge (elastic.bridge)."""
    outer: tyro.conf.Positional[str]
    """Store of the outer run; the first bridge creates the run."""
    num_replicas: int | None = None
    """Regions whose bridges must be present together before their first outer step; None is the run's, or 1."""
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    """The outer run's, whose inner steps are the region's outer steps: by default sync_every is 4 per fragment,
    and overlap_steps 1."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """The outer run's."""
    runs: Path = TrainConfig.runs
    """Directory in which the bridge keeps its notes, below its name."""
    timeout_seconds: float = TrainConfig.timeout_seconds
    """Seconds to wait for a store, or for the other bridges, before giving up."""


def asked(region: str, outer: str) -> BridgeConfig:
    """The settings of a bridge that nobody has changed: the outer run's, or where there is none, the region's.

    Raises:
        UserError: if the region's store holds no run, or either run is another program's.
        FileError: if an entry 0 is damaged.
        StoreError: if a store can't be read.
    """
    create, existing = create_of(region), _existing(outer)
    num_fragments = create.rules.num_fragments
    diloco = replace(
        known(region, config_of(create.facts)).diloco,
        sync_every=_ROUNDS_APART * num_fragments,
        overlap_steps=None,
        offsets=None,
        first_sync="full_period",
        merge="mix",
        mixing=0.0,
    )
    return BridgeConfig(region=region, outer=outer, diloco=diloco if existing is None else existing.diloco)


def _existing(outer: str) -> TrainConfig | None:
    """The config of the outer run; None if there is none yet."""
    try:
        facts = create_of(outer).facts
    except FileError:
        raise
    except UserError:
        return None
    return known(outer, config_of(facts))


def run_bridge(
    config: BridgeConfig, *, on_step: Callable[[OuterStep, tuple[str, ...]], object] = lambda step, names: None
) -> None:
    """Be a region's bridge until the region's run is over.

    Args:
        config: of the bridge.
        on_step: called with each outer step of the outer run, and the names of the bridges that it counts.

    Raises:
        UserError: if the region names no bridge, or a setting can't be right.
        DisagreementError: if the outer run has other settings, or its regions have another model.
        ExchangeError: if a run does not go on in time.
    """
    create = create_of(config.region)
    own, name = known(config.region, config_of(create.facts)), create.rules.bridge
    if not name:
        raise UserError(
            f"the run in {config.region} names no bridge: create it with elastic.bridge=NAME, a name of its own",
            *("region", "elastic.bridge"),
        )
    outer = StoreRendezvous(
        config.outer,
        name=name,
        num_replicas=config.num_replicas,
        timeout_seconds=config.timeout_seconds,
        facts=_facts(config, own) | _tokenizer(create),
        **vars(config.elastic),
    )
    most = min(create.rules.num_fragments, config.diloco.sync_every - 1)
    overlap = config.diloco.overlap_steps
    replica = _replica(replace(config.diloco, overlap_steps=most if overlap is None else overlap), own)
    with stoppable(), _region(config, own, create, replica.parameters) as region, leaving(outer):
        bridge = Bridge(region, replica, outer, config.runs / name / "bridge")
        while not region.is_closed:
            outer_steps = bridge.step()
            for outer_step in outer_steps:
                members = () if outer_step.cohort is None else outer_step.cohort.members
                on_step(outer_step, tuple(outer.state.members[member].name for member in members))
            if not outer_steps:
                time.sleep(_PAUSE_SECONDS)
        bridge.finish()


def _facts(config: BridgeConfig, own: TrainConfig) -> dict[str, Any]:
    """The facts of the outer run, from which its Θ becomes a model; its regions may differ in all others."""
    size = config.num_replicas or 1
    budget = {"num_tokens": size * own.num_tokens, "global_batch": size * own.global_batch}
    base = _existing(config.outer) or replace(own, **budget)
    of_regions = {name: getattr(own, name) for name in ("model", "seed", "sequence_length")}
    facts = facts_with_rendezvous(replace(base, diloco=config.diloco, **of_regions))
    return {name: value for name, value in facts.items() if is_within(name, _SHARED)}


def _tokenizer(create: Create) -> dict[str, Any]:
    """The fact of a region by which the outer run refuses one with other tokens."""
    return {name: value for name, value in create.facts.items() if name == TOKENIZER_DIGEST}


def _replica(diloco: DilocoConfig, own: TrainConfig) -> Replica:
    """The bridge in one of its runs, before it has joined."""
    model = own.model.initial(seed=own.seed)
    settings = engine_settings(diloco, model, seed=own.seed)
    settings.check(model, None)
    settings.check_rendezvous()
    parameters = FragmentParameters(model, settings.fragments)
    return Replica(settings, parameters, outer_state(settings, parameters, offload=False))


@contextmanager
def _region(
    config: BridgeConfig, own: TrainConfig, create: Create, parameters: FragmentParameters
) -> Iterator[Region | ClosedRegion]:
    """The region, which the bridge joins, and leaves at the end of the context, unless its run is over."""
    name, seconds = create.rules.bridge, config.timeout_seconds
    if not Look(config.region).again().finished:
        # These facts hold those that the engine states, too, and the region's text, which is not here.
        rendezvous = StoreRendezvous(
            config.region, name=name, bridge=name, facts=create.facts, timeout_seconds=seconds
        )
        with leaving(rendezvous):
            try:
                region = Region(_replica(replace(own.diloco, overlap_steps=0), own), rendezvous)
            except LogError as error:
                rendezvous.abort(str(error))
                if not Look(config.region).again().finished:  # it was not closed meanwhile
                    raise
            else:
                yield region
                return
    replay = replayed(config.region, initial=initial_parameters, from_snapshot=True)
    named = replay.parameters()
    yield ClosedRegion(replay, [parameters.flat_of(p, named) for p in range(create.rules.num_fragments)])
