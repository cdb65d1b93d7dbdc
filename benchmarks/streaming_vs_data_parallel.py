"""Streaming DiLoCo against Data-Parallel at the same tokens and batch, each at its best learning rate.

    python benchmarks/streaming_vs_data_parallel.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

Runs one grid of learning rates for both methods with the first seed; then, at each method's best rate, the other
seeds, FP32 on the wire, and plain averaging (η = 1, μ = 0) as the sanity check. A run that is finished is not run
again, one that was interrupted is resumed. Writes DIR/results.csv after every run and prints the comparison.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

STEP_TOKENS = 8 * 256
LEARNING_RATES = (0.004, 0.00283, 0.00566, 0.002, 0.00141)
VARIANTS = {
    "data_parallel": ["--method", "data_parallel"],
    "streaming": [],
    "streaming_fp32": ["--diloco.wire", "fp32"],
    "averaging": ["--diloco.outer-learning-rate", "1.0", "--diloco.outer-momentum", "0.0"],
}
COLUMNS = (
    "variant",
    "seed",
    "learning_rate",
    "eval_loss",
    "eval_standard_error",
    "eval_bits_per_byte",
    "num_params",
    "num_tokens",
    "num_steps",
    "bytes_sent_per_replica",
    "data_parallel_bytes_per_replica",
    "compute_utilization",
    "wall_seconds",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []

    def run_and_write(variant: str, seed: int, rate: float) -> None:
        rows.append(run(variant, seed, rate, arguments))
        with (arguments.output / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    first_seed, *other_seeds = arguments.seeds
    for rate in LEARNING_RATES:
        for variant in ("data_parallel", "streaming"):
            run_and_write(variant, first_seed, rate)
    best = {variant: best_rate(rows, variant) for variant in ("data_parallel", "streaming")}
    for variant in ("streaming_fp32", "averaging"):
        run_and_write(variant, first_seed, best["streaming"])
    for seed in other_seeds:
        for variant in VARIANTS:
            run_and_write(variant, seed, best.get(variant, best["streaming"]))
    compare(rows)


def run(variant: str, seed: int, rate: float, arguments: argparse.Namespace) -> dict:
    """One run of the trainer, or what an earlier call left of it."""
    name = f"{variant}-seed{seed}-lr{rate:g}"
    summary = arguments.output / name / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "diloco", "train", "laptop", "--name", name]
        command += ["--runs", str(arguments.output), "--data.cache", str(arguments.output / "data")]
        command += ["--data.train", str(arguments.train), "--data.held-out", str(arguments.held_out)]
        command += ["--seed", str(seed), "--optimizer.learning-rate", str(rate)]
        command += ["--global-batch", "8", "--num-tokens", str(arguments.steps * STEP_TOKENS)]
        command += ["--evaluation.num-tokens", "1000000"]
        config = arguments.output / name / "config.json"
        command += [*VARIANTS[variant], *(["--resume", str(config.parent)] if config.exists() else [])]
        subprocess.run(command, check=True)
    values = json.loads(summary.read_text())
    return {"variant": variant, "seed": seed, "learning_rate": rate} | {c: values[c] for c in COLUMNS[3:]}


def best_rate(rows: list[dict], variant: str) -> float:
    """The learning rate of a variant's lowest loss."""
    return min((row for row in rows if row["variant"] == variant), key=lambda row: row["eval_loss"])[
        "learning_rate"
    ]


def at_rate(rows: list[dict], variant: str, rate: float) -> list[dict]:
    return [row for row in rows if row["variant"] == variant and row["learning_rate"] == rate]


def mean_loss(rows: list[dict]) -> float:
    return statistics.mean(row["eval_loss"] for row in rows)


def compare(rows: list[dict]) -> None:
    """Mean loss over the seeds of each variant at its best rate, beside Data-Parallel's."""
    first_seed = [row for row in rows if row["seed"] == rows[0]["seed"]]
    baseline = mean_loss(at_rate(rows, "data_parallel", best_rate(first_seed, "data_parallel")))
    print(f"{'variant':16} {'rate':>8} {'loss':>8} {'to Data-Parallel':>17} {'seeds':>18} {'fewer bytes':>12}")
    for variant in VARIANTS:
        rate = best_rate(first_seed, variant)
        chosen = at_rate(rows, variant, rate)
        seeds = " ".join(f"{row['eval_loss']:.4f}" for row in chosen)
        fewer = chosen[0]["data_parallel_bytes_per_replica"] / chosen[0]["bytes_sent_per_replica"]
        loss = mean_loss(chosen)
        print(f"{variant:16} {rate:8g} {loss:8.4f} {loss / baseline - 1:+17.2%} {seeds:>18} {fewer:11.1f}×")


if __name__ == "__main__":
    main()
