"""Streaming DiLoCo against Data-Parallel at the same tokens and batch, each at its best learning rate.

    python benchmarks/streaming_vs_data_parallel.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

Runs one grid of learning rates for both methods with the first seed; then, at each method's best rate, the other
seeds, FP32 on the wire, and plain averaging (η = 1, μ = 0) as the sanity check. A run that is finished is not run
again, one that was interrupted is resumed. Writes DIR/results.csv after every run and prints the comparison.
"""

import statistics

from training_runs import parser, train, write

STEP_TOKENS = 8 * 256
LEARNING_RATES = (0.004, 0.00283, 0.00566, 0.002, 0.00141)
VARIANTS = {
    "data_parallel": ["--method", "data_parallel"],
    "streaming": [],
    "streaming_fp32": ["--diloco.wire", "fp32"],
    "averaging": ["--diloco.outer-learning-rate", "1.0", "--diloco.outer-momentum", "0.0"],
}


def main() -> None:
    options = parser(__doc__, seeds=(0, 1))
    options.add_argument("--steps", type=int, default=2048)
    arguments = options.parse_args()
    rows: list[dict] = []

    def run(variant: str, seed: int, rate: float) -> None:
        flags = ["--seed", str(seed), "--optimizer.learning-rate", str(rate), "--global-batch", "8"]
        flags += ["--num-tokens", str(arguments.steps * STEP_TOKENS), *VARIANTS[variant]]
        found = train(f"{variant}-seed{seed}-lr{rate:g}", flags, arguments)
        rows.append({"variant": variant, "seed": seed, "learning_rate": rate, **found})
        write(rows, arguments.output)

    first_seed, *other_seeds = arguments.seeds
    for rate in LEARNING_RATES:
        for variant in ("data_parallel", "streaming"):
            run(variant, first_seed, rate)
    best = {variant: best_rate(rows, variant) for variant in ("data_parallel", "streaming")}
    for variant in ("streaming_fp32", "averaging"):
        run(variant, first_seed, best["streaming"])
    for seed in other_seeds:
        for variant in VARIANTS:
            run(variant, seed, best.get(variant, best["streaming"]))
    compare(rows)


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
