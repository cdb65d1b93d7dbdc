"""A run of four replicas that come, go and lag, in virtual time: the trainer's model, text and step."""

import heapq
import math
import statistics
from dataclasses import dataclass, field, replace

import torch

from diloco.data.sampling import Batches
from diloco.data.shards import TokenShards
from diloco.engine import elastic as elastic_rounds
from diloco.rendezvous.log.entries import Rules
from diloco.schedule import Schedule
from diloco.training.config.config import TrainConfig
from diloco.training.loop import inner_step, open_batches
from diloco.training.optimizer import learning_rate
from diloco.training.records.summary import HeldOut, evaluate
from diloco.training.state import TrainState, initial_state
from diloco.training.world import World, alone
from virtual_time.rendezvous import Seat, VirtualLog

NUM_REPLICAS = 4
TICK = 30
"""Virtual time of an inner step of a replica of speed 1, so that those of all speeds here are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The lives of the four replicas."""

    name: str
    text: str
    """The setting in words, for tables."""
    speeds: tuple[float, ...] = (1.0,) * NUM_REPLICAS
    lags: tuple[int, ...] = (0,) * NUM_REPLICAS
    """Rounds by which each replica's payloads enter late."""
    away: int | None = None
    """The replica that trains in every second period of H steps only."""
    join_rounds: int = 0
    """Rounds between two replacements of a replica, in turn, by a new one; 0 replaces none."""
    keeps_moments: bool = False
    """True if a joiner takes over the moments of AdamW."""
    sync_periods: float = 1.0
    """H as a multiple of the others'."""
    outer_scale: float = 1.0
    """η as a multiple of the others'."""

    @property
    def all_lag(self) -> bool:
        """True if no replica is on time: replicas take turns then, and rounds wait for no majority."""
        return min(self.lags) > 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    setting: str
    seed: int
    eval_loss: float
    """Held-out loss of Θ, nats per token."""
    eval_standard_error: float
    counted_tokens: int
    """Tokens that the outer steps have counted."""
    read_tokens: int
    """Tokens that all replicas have read."""
    rounds: float
    """Outer steps per fragment."""
    contributors: float
    """Contributions an outer step."""
    staleness: float
    """Rounds between a contribution's base and its outer step, on average."""
    steps: float
    """Inner steps that a contribution tells, on average."""
    num_params: int
    learning_rate: float
    sync_every: int
    outer_hash: str


@dataclass(eq=False)
class Replica:
    """One replica: its place in the log, and what trains it."""

    seat: Seat
    state: TrainState
    world: World
    batches: Batches

    def step(self, config: TrainConfig) -> None:
        """An inner step, as the trainer takes it."""
        state = self.state
        tokens = state.progress.after(state.step).next_tokens  # others have taken steps since
        rate = learning_rate(config.optimizer, tokens / config.tokens_per_step, num_steps=config.num_steps)
        batch = self.batches.batch(state.step + 1)
        inner_step(state, batch, self.world, rate)
        state.synchronizer.step(tokens=len(batch) * config.sequence_length)
        state.step += 1


@dataclass(eq=False)
class Run:
    """One run of a setting."""

    config: TrainConfig
    setting: Setting
    corpus: TokenShards
    replicas: list[Replica] = field(default_factory=list)
    read_tokens: int = 0

    def __post_init__(self) -> None:
        num_fragments = 1 + -(-self.config.model.num_layers // self.config.diloco.layers_per_fragment)
        sync_every = self.config.diloco.sync_every
        self.schedule = Schedule(sync_every=sync_every, num_fragments=num_fragments)
        """The fixed members'."""
        self.log = VirtualLog(
            rules=Rules(num_fragments=num_fragments),
            patience=0 if self.setting.all_lag else sync_every,
            arrival=self._arrival,
        )
        self.replicas = [self._joined(m) for m in range(NUM_REPLICAS)]

    def _joined(self, m: int) -> Replica:
        """A new replica with the name, and so the slot, of the m-th."""
        seat = Seat(self.log, name=f"replica-{m}")
        # The seat does what training asks of a StoreRendezvous.
        # pyrefly: ignore[bad-argument-type]
        world = replace(alone(self.config.precision), rendezvous=seat)
        state = initial_state(self.config, world)
        return Replica(seat, state, world, open_batches(self.config, world, self.corpus))

    def _arrival(self, seat: Seat, fragment: int, base_round: int) -> float:
        """Now, or the time at which the fixed members would begin the round that a late payload is to enter."""
        lag = self.setting.lags[seat.slot]
        if not lag:
            return 0
        if self.setting.all_lag and seat.replica not in seat.state.fragments[fragment].last_seq:
            lag = seat.slot % (lag + 1)  # so that replicas take turns
        return TICK * (self.schedule.send_step(fragment) + (base_round + lag) * self.schedule.sync_every)

    def train(self) -> None:
        """Train until outer steps have counted the budget; then each replica takes those that it does not know."""
        ends = [(int(TICK / speed), m) for m, speed in enumerate(self.setting.speeds)]
        heapq.heapify(ends)
        num_fragments = self.log.rules.num_fragments
        while self.log.state.tokens < self.config.num_tokens * num_fragments:
            self.log.now = ends[0][0]
            while ends[0][0] == self.log.now:
                _, m = ends[0]
                if not self._is_away(m):
                    self._step(m)
                heapq.heapreplace(ends, (int(self.log.now + TICK / self.setting.speeds[m]), m))
            self.log.decide()
            self._replace_one()
        for _ in range(self.config.diloco.sync_every):
            for m in range(NUM_REPLICAS):
                self.replicas[m].step(self.config)
        assert len({self.outer_hash(m) for m in range(NUM_REPLICAS)}) == 1, "Θ is equal on all replicas"

    def outer_hash(self, m: int) -> str:
        """The hash of a replica's Θ."""
        return self.replicas[m].state.synchronizer.outer_hash()

    def _step(self, m: int) -> None:
        self.replicas[m].step(self.config)
        self.read_tokens += self.config.process_batch * self.config.sequence_length

    def _is_away(self, m: int) -> bool:
        period = (self.log.now - 1) // (TICK * self.config.diloco.sync_every)
        return m == self.setting.away and period % 2 == 1

    def _replace_one(self) -> None:
        """Replace a replica in the middle of a period: what was not counted is lost."""
        period, sync_every = self.setting.join_rounds, self.config.diloco.sync_every
        if not period or self.log.now % (TICK * period * sync_every) != TICK * (sync_every // 2):
            return
        number = int(self.log.now // (TICK * period * sync_every))
        m = number % NUM_REPLICAS
        before = self.replicas[m]
        self.replicas[m] = self._joined(m)
        if self.setting.keeps_moments:
            self.replicas[m].state.optimizer.load_state_dict(before.state.optimizer.state_dict())

    def row(self, held_out: HeldOut) -> Row:
        """The measurements."""
        first, entries = self.replicas[0], self.log.entries
        measured = evaluate(first.state, first.world, held_out, together=False)
        parts = [(body, c) for body in entries for c in body.contributions]
        num_fragments = self.log.rules.num_fragments
        return Row(
            setting=self.setting.name,
            seed=self.config.seed,
            eval_loss=round(measured.loss, 6),
            eval_standard_error=round(measured.standard_error or 0.0, 6),
            counted_tokens=self.log.state.tokens // num_fragments,
            read_tokens=self.read_tokens,
            rounds=round(len(entries) / num_fragments, 2),
            contributors=round(len(parts) / len(entries), 3),
            staleness=round(statistics.mean(body.round - 1 - c.base_round for body, c in parts), 3),
            steps=round(statistics.mean(c.steps for _, c in parts), 2),
            num_params=sum(parameter.numel() for parameter in first.state.model.parameters()),
            learning_rate=self.config.optimizer.learning_rate,
            sync_every=self.config.diloco.sync_every,
            outer_hash=self.outer_hash(0),
        )


def set_up_process() -> None:
    """Compute on one thread, and take no decision by the clock on the wall."""
    torch.set_num_threads(1)
    # An engine that has spent 0.05 s on outer steps leaves the others for its next step: not in virtual time.
    elastic_rounds._MOST_SECONDS = math.inf
