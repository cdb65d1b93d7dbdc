"""Held-out loss when replicas come, go and lag, against the same replicas as fixed members.

    python benchmarks/elastic_loss.py --train books/train.jsonl --held-out books/valid_chapters.jsonl --output OUT

Four replicas train with the trainer's own model, text and step around a rendezvous in virtual time: speeds, delays
and joins are part of the setting, and no number depends on how busy the machine is. Every run ends when its outer
steps have counted the same number of tokens. Rows go to OUT/elastic_loss.csv as the runs finish; a run that has a
row there is left out, and several commands with other seeds or settings may share OUT.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from virtual_time.run import NUM_REPLICAS, Row, Run, Setting, set_up_process

from diloco.data.shards import open_split
from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import outer_rate
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.prepare import prepare_run
from diloco.training.records.summary import open_held_out

SETTINGS = (
    Setting(name="fixed", text="fixed members (control)"),
    Setting(name="fixed_06_h", text="fixed members, 0.6 H", sync_periods=0.6),
    Setting(name="fixed_2_h", text="fixed members, 2 H", sync_periods=2),
    Setting(name="fixed_4_h", text="fixed members, 4 H", sync_periods=4),
    Setting(name="one_lags_1", text="1 of 4 lags by 1, and so misses every second round", lags=(0, 0, 0, 1)),
    Setting(name="one_lags_2", text="1 of 4 lags by 2", lags=(0, 0, 0, 2)),
    Setting(name="one_lags_3", text="1 of 4 lags by 3", lags=(0, 0, 0, 3)),
    Setting(name="all_lag_1", text="all lag by 1, in turns", lags=(1, 1, 1, 1)),
    Setting(name="all_lag_2", text="all lag by 2, in turns", lags=(2, 2, 2, 2)),
    Setting(name="all_lag_3", text="all lag by 3, in turns", lags=(3, 3, 3, 3)),
    Setting(name="all_lag_1_eta", text="all lag by 1, in turns, η / 2", lags=(1, 1, 1, 1), outer_scale=1 / 2),
    Setting(name="all_lag_3_eta", text="all lag by 3, in turns, η / 4", lags=(3, 3, 3, 3), outer_scale=1 / 4),
    Setting(name="one_away", text="1 of 4 trains in every second round only", away=3),
    Setting(name="cold_joins", text="a new replica every 2 rounds, AdamW cold", join_rounds=2),
    Setting(name="warm_joins", text="the same, AdamW's moments kept", join_rounds=2, keeps_moments=True),
    Setting(name="speeds", text="speeds 1, 1, 1.5, 2.5", speeds=(1.0, 1.0, 1.5, 2.5)),
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
    set_up_process()
    base = resolved(prepare_run(asked(arguments)))
    assert base.data.prepared is not None, "the config is resolved"
    corpus, held_out = open_split(base.data.prepared, "train"), open_held_out(base)
    path = arguments.output / "elastic_loss.csv"
    for seed in arguments.seeds:
        for setting in SETTINGS:
            is_asked = arguments.settings is None or setting.name in arguments.settings
            if not is_asked or (setting.name, str(seed)) in {(r["setting"], r["seed"]) for r in rows_of(path)}:
                continue
            diloco = replace(
                base.diloco,
                sync_every=round(base.diloco.sync_every * setting.sync_periods),
                outer_learning_rate=outer_rate(base) * setting.outer_scale,
            )
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
