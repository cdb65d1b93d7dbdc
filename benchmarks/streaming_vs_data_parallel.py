"""Streaming DiLoCo against Data-Parallel at the same tokens and batch, each at its best learning rate.

    python benchmarks/streaming_vs_data_parallel.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

Runs one grid of learning rates for both methods with the first seed; then, at each method's best rate, the other
seeds, FP32 on the wire, and plain averaging (η = 1, μ = 0) as the sanity check. A finished run is not run again,
an interrupted one is resumed. Writes DIR/results.csv after every run and prints the comparison.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training_runs import base_config, best_rate, finish, parser

from diloco.experiments.runner.grid import LabelledRun
from diloco.presets import Method
from diloco.training.config.config import TrainConfig

LEARNING_RATES = (0.004, 0.00283, 0.00566, 0.002, 0.00141)
STREAMING: Method = "streaming_overlapped_fp4"
VARIANTS: dict[str, tuple[Method, dict[str, Any]]] = {
    "data_parallel": ("data_parallel", {}),
    STREAMING: (STREAMING, {}),
    "streaming_overlapped": ("streaming_overlapped", {}),
    "averaging": (STREAMING, {"outer_learning_rate": 1.0, "outer_momentum": 0.0}),
}
"""A method, and fields of DilocoConfig by name."""
TUNED = ("data_parallel", STREAMING)
"""Variants with a learning rate of their own; the others take that of STREAMING."""


def main() -> None:
    options = parser(__doc__, seeds=(0, 1), learning_rates=LEARNING_RATES)
    options.add_argument("--steps", type=int, default=2048)
    arguments = options.parse_args()
    base = base_config(arguments, num_steps=arguments.steps)
    first_seed = arguments.seeds[0]
    grid = [run(base, variant, first_seed, rate) for rate in arguments.learning_rates for variant in TUNED]
    rows = finish(grid, arguments.output)
    best = {variant: best_rate(rows, variant) for variant in TUNED}
    others = [
        run(base, variant, seed, best.get(variant, best[STREAMING]))
        for seed in arguments.seeds
        for variant in VARIANTS
        if (variant, seed) not in {(tuned, first_seed) for tuned in TUNED}
    ]
    compare(finish(grid + others, arguments.output))


def run(base: TrainConfig, variant: str, seed: int, rate: float) -> LabelledRun:
    method, fields = VARIANTS[variant]
    config = replace(
        base,
        method=method,
        seed=seed,
        optimizer=replace(base.optimizer, learning_rate=rate),
        diloco=replace(base.diloco, **fields),
    )
    return LabelledRun(labels={"variant": variant, "seed": seed, "learning_rate": rate}, config=config)


def at_rate(rows: Sequence[dict[str, Any]], variant: str, rate: float) -> list[dict[str, Any]]:
    return [row for row in rows if row["variant"] == variant and row["learning_rate"] == rate]


def mean_loss(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.mean(row["eval_loss"] for row in rows)


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Print each variant's mean loss over the seeds at its best rate, beside Data-Parallel's."""
    first_seed = [row for row in rows if row["seed"] == rows[0]["seed"]]
    baseline = mean_loss(at_rate(rows, "data_parallel", best_rate(first_seed, "data_parallel")))
    print(f"{'variant':24} {'rate':>8} {'loss':>8} {'to Data-Parallel':>17} {'seeds':>18} {'fewer bytes':>12}")
    for variant in VARIANTS:
        rate = best_rate(first_seed, variant)
        chosen = at_rate(rows, variant, rate)
        seeds = " ".join(f"{row['eval_loss']:.4f}" for row in chosen)
        fewer = chosen[0]["data_parallel_bytes_per_replica"] / chosen[0]["bytes_sent_per_replica"]
        loss = mean_loss(chosen)
        print(f"{variant:24} {rate:8g} {loss:8.4f} {loss / baseline - 1:+17.2%} {seeds:>18} {fewer:11.1f}×")


if __name__ == "__main__":
    main()
