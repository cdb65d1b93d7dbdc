"""Held-out loss when replicas come, go and lag, against the same replicas as fixed members.

    python benchmarks/elastic_loss.py --train books/train.jsonl --held-out books/valid_chapters.jsonl --output OUT

Four replicas train with the trainer's own model, text and step around a rendezvous in virtual time: speeds, delays
and joins are part of the setting, and no number depends on how busy the machine is. Every run ends when its outer
steps have counted the same number of tokens. Rows go to OUT/elastic_loss.csv as the runs finish; a run that has a
row there is left out, and several commands with other seeds or settings may share OUT.
"""

import argparse
import csv
import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from virtual_rendezvous import Seat, VirtualLog

from diloco.data.sampling import Batches, SlotBatches
from diloco.data.shards import TokenShards, open_split
from diloco.engine import elastic_rounds
from diloco.models.decoder_config import DecoderConfig
from diloco.rendezvous.entries import Rules
from diloco.schedule import Schedule
from diloco.training.config import TrainConfig
from diloco.training.loop import open_batches
from diloco.training.prepare import prepare_run
from diloco.training.recipes import recipe
from diloco.training.state import TrainState, initial_state
from diloco.training.step import inner_step, learning_rate
from diloco.training.summary import evaluate
from diloco.training.world import World, alone

NUM_REPLICAS = 4
TICK = 30
"""Virtual time of an inner step of a replica of speed 1, so that those of all speeds here are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The lives of the four replicas."""

    name: str
    text: str
    """What the table says of it."""
    speeds: tuple[float, ...] = (1.0,) * NUM_REPLICAS
    lags: tuple[int, ...] = (0,) * NUM_REPLICAS
    """Rounds by which each replica's payloads enter late."""
    away: int | None = None
    """The replica that trains in every second period of H steps only."""
    join_rounds: int = 0
    """Rounds between two replacements of a replica, in turn, by a new one; 0 replaces none."""
    keeps_moments: bool = False
    """Whether a joiner takes over the moments of AdamW."""
    sync_periods: int = 1
    """H as a multiple of the others'."""

    @property
    def all_lag(self) -> bool:
        """Whether nobody is on time: replicas take turns then, and rounds wait for no majority."""
        return min(self.lags) > 0


SETTINGS = (
    Setting(name="fixed", text="fixed members (control)"),
    *(
        Setting(name=f"one_lags_{s}", text=f"1 of 4 lags by {s}", lags=(0, 0, 0, s))
        for s in range(1, NUM_REPLICAS)
    ),
    *(
        Setting(name=f"all_lag_{s}", text=f"all lag by {s}, in turns", lags=(s,) * NUM_REPLICAS)
        for s in range(1, NUM_REPLICAS)
    ),
    *(
        Setting(name=f"fixed_{n}_h", text=f"fixed members, {n} H", sync_periods=n)
        for n in range(2, NUM_REPLICAS + 1, 2)
    ),
    Setting(name="one_away", text="1 of 4 is away in every second round", away=3),
    Setting(name="cold_joins", text="a new replica every 2 rounds, AdamW cold", join_rounds=2),
    Setting(name="warm_joins", text="the same, AdamW's moments kept", join_rounds=2, keeps_moments=True),
    Setting(name="speeds", text="speeds 1, 1, 1.5, 2.5", speeds=(1.0, 1.0, 1.5, 2.5)),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    setting: str
    seed: int
    eval_loss: float
    """Held-out loss of Θ, nats a token."""
    eval_standard_error: float
    counted_tokens: int
    """Tokens that the outer steps have counted."""
    read_tokens: int
    """Tokens that all replicas have read."""
    rounds: float
    """Outer steps a fragment."""
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
    batches: Batches | SlotBatches

    def step(self, config: TrainConfig) -> None:
        """An inner step, as the trainer takes it."""
        state = self.state
        rate = learning_rate(config, state.progress.tokens(state.step + 1) / config.tokens_per_step)
        batch = self.batches.batch(state.step + 1)
        inner_step(state, batch, config, self.world, rate)
        state.sync.step(tokens=len(batch) * config.sequence_length)
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
        world = replace(alone(self.config), rendezvous=seat)
        state = initial_state(self.config, world)
        return Replica(seat, state, world, open_batches(self.config, world, self.corpus))

    def _arrival(self, seat: Seat, fragment: int, base_round: int) -> float:
        """At once, or when the fixed members would begin the round that a late payload is to enter."""
        lag = self.setting.lags[seat.slot]
        if not lag:
            return 0
        if self.setting.all_lag and seat.last_counted(seat.replica, fragment) < 0:
            lag = seat.slot % (lag + 1)  # so that replicas take turns
        return TICK * (self.schedule.send_step(fragment) + (base_round + lag) * self.schedule.sync_every)

    def train(self) -> None:
        """Until the outer steps have counted the budget; then each replica takes those that it does not know."""
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
        return self.replicas[m].state.sync.outer_hash()

    def _step(self, m: int) -> None:
        self.replicas[m].step(self.config)
        self.read_tokens += self.config.process_batch * self.config.sequence_length

    def _is_away(self, m: int) -> bool:
        period = (self.log.now - 1) // (TICK * self.config.diloco.sync_every)
        return m == self.setting.away and period % 2 == 1

    def _replace_one(self) -> None:
        """Replace a replica in the middle of a period: what it has not told is lost."""
        period, sync_every = self.setting.join_rounds, self.config.diloco.sync_every
        if not period or self.log.now % (TICK * period * sync_every) != TICK * (sync_every // 2):
            return
        number = int(self.log.now // (TICK * period * sync_every))
        m = number % NUM_REPLICAS
        before = self.replicas[m]
        self.replicas[m] = self._joined(m)
        if self.setting.keeps_moments:
            self.replicas[m].state.optimizer.load_state_dict(before.state.optimizer.state_dict())

    def row(self, held_out: TokenShards) -> Row:
        """The measurements."""
        first, entries = self.replicas[0], self.log.entries
        measured = evaluate(first.state, self.config, first.world, held_out, together=False)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=[s.name for s in SETTINGS], default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=500, help="inner steps of each replica as fixed members")
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step of each replica")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--eval-tokens", type=int, default=131_072)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # An engine that has spent 0.05 s on outer steps leaves the others for its next step: not in virtual time.
    elastic_rounds._MOST_SECONDS = math.inf
    base = prepare_run(asked(arguments), resume=None)
    assert base.data.prepared is not None, "the config is resolved"
    corpus, held_out = (open_split(base.data.prepared, split) for split in ("train", "held_out"))
    path = arguments.output / "elastic_loss.csv"
    for seed in arguments.seeds:
        for setting in SETTINGS:
            is_asked = arguments.settings is None or setting.name in arguments.settings
            if not is_asked or (setting.name, str(seed)) in {(r["setting"], r["seed"]) for r in rows_of(path)}:
                continue
            diloco = replace(base.diloco, sync_every=base.diloco.sync_every * setting.sync_periods)
            run = Run(replace(base, seed=seed, diloco=diloco), setting, corpus)
            run.train()
            row = run.row(held_out)
            print(f"{row.setting}, seed {seed}: {row.eval_loss:.4f}", flush=True)
            append(path, row)
    print(table(rows_of(path)))


def asked(arguments: argparse.Namespace) -> TrainConfig:
    """The trainer's config that the runs have in common."""
    base, batch = recipe("laptop"), NUM_REPLICAS * arguments.batch
    data = {"train": (arguments.train,), "held_out": (arguments.held_out,), "cache": arguments.output / "data"}
    return replace(
        base,
        name="elastic_loss",
        runs=arguments.output / "runs",
        num_replicas=NUM_REPLICAS,
        num_tokens=arguments.steps * batch * arguments.sequence_length,
        global_batch=batch,
        sequence_length=arguments.sequence_length,
        model=DecoderConfig(num_layers=arguments.layers, num_heads=2, width=arguments.width),
        optimizer=replace(base.optimizer, learning_rate=arguments.learning_rate),
        diloco=replace(base.diloco, sync_every=arguments.sync_every, layers_per_fragment=2),
        precision="fp32",  # faster than bfloat16 for so small a model
        data=replace(base.data, **data),
        evaluation=replace(base.evaluation, num_tokens=arguments.eval_tokens),
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: Row) -> None:
    """Add a row to a table."""
    values = asdict(row)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(values)


def table(rows: Sequence[dict[str, str]]) -> str:
    """The means over the seeds, beside the control's of the same seed, as Markdown."""
    control = {row["seed"]: float(row["eval_loss"]) for row in rows if row["setting"] == "fixed"}
    lines = [
        "| setting | held-out loss, each seed | over fixed members | staleness | contributors | steps | rounds "
        "| tokens read / counted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        mine = sorted((row for row in rows if row["setting"] == setting.name), key=lambda row: int(row["seed"]))
        if not mine:
            continue

        def mean(column: str, mine: Sequence[dict[str, Any]] = mine) -> float:
            return statistics.mean(float(row[column]) for row in mine)

        losses = ", ".join(f"{float(row['eval_loss']):.4f}" for row in mine)
        ratios = [float(row["eval_loss"]) / control.get(row["seed"], math.nan) for row in mine]
        over = [f"{100 * (ratio - 1):+.2f} %" for ratio in ratios]
        lines.append(
            f"| {setting.text} | {losses} | {', '.join(over)} | {mean('staleness'):.2f} | "
            f"{mean('contributors'):.2f} | {mean('steps'):.0f} | {mean('rounds'):.0f} | "
            f"{mean('read_tokens') / mean('counted_tokens'):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
