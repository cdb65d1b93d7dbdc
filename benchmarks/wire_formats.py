"""Held-out loss with every codec, with error feedback, with four replicas and with reduce_scatter.

    python benchmarks/wire_formats.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

A model of 0.3M parameters, 1,048,576 tokens a run, everything but the codec the same. The learning rate is the
best of a grid for FP32 on the wire and the first seed. A run that is finished is not run again, one that was
interrupted is resumed. Writes DIR/results.csv after every run and prints mean and spread over the seeds.
"""

import re
import statistics

from training_runs import parser, train, write

LEARNING_RATES = (0.002, 0.004, 0.008, 0.016)
DENSE = ("fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "e3m0", "int8", "int4", "int2")
SPARSE = ("topk", "feddropout", "dare")
FEEDBACK = ("--diloco.error-feedback", "1.0")
NO_MIXING = ("--diloco.mixing", "0.0")
AVERAGING = ("--diloco.outer-learning-rate", "1.0", "--diloco.outer-momentum", "0.0")
OFTEN = ("--diloco.sync-every", "5")
VARIANTS: dict[str, list[str]] = {
    **{wire: ["--diloco.wire", wire] for wire in (*DENSE, *SPARSE)},
    **{
        f"{wire}, error feedback": ["--diloco.wire", wire, *FEEDBACK]
        for wire in ("e2m1", "e3m0", "int4", "int2", "topk", "feddropout")
    },
    **{f"{wire}:density=0.25": ["--diloco.wire", f"{wire}:density=0.25"] for wire in SPARSE},
    "fp32, α=0": ["--diloco.wire", "fp32", *NO_MIXING],
    "topk, α=0": ["--diloco.wire", "topk", *NO_MIXING],
    "topk, error feedback, α=0": ["--diloco.wire", "topk", *NO_MIXING, *FEEDBACK],
    "feddropout, error feedback, α=0": ["--diloco.wire", "feddropout", *NO_MIXING, *FEEDBACK],
    "fp32, α=0, η=1, μ=0": ["--diloco.wire", "fp32", *NO_MIXING, *AVERAGING],
    "topk, α=0, η=1, μ=0": ["--diloco.wire", "topk", *NO_MIXING, *AVERAGING],
    "topk, error feedback, α=0, η=1, μ=0": ["--diloco.wire", "topk", *NO_MIXING, *AVERAGING, *FEEDBACK],
    "fp32, α=0, η=1, μ=0, H=5": ["--diloco.wire", "fp32", *NO_MIXING, *AVERAGING, *OFTEN],
    "topk, α=0, η=1, μ=0, H=5": ["--diloco.wire", "topk", *NO_MIXING, *AVERAGING, *OFTEN],
    "topk, error feedback, α=0, η=1, μ=0, H=5": [
        *("--diloco.wire", "topk", *NO_MIXING, *AVERAGING, *OFTEN, *FEEDBACK)
    ],
    "dare:density=0.75": ["--diloco.wire", "dare:density=0.75"],
    "dare:density=0.75, error feedback": ["--diloco.wire", "dare:density=0.75", *FEEDBACK],
    **{f"{wire}, stochastic": ["--diloco.wire", f"{wire}:stochastic=true"] for wire in ("e3m0", "int4", "int2")},
    **{
        f"{wire}, M=4, {combine}": ["--diloco.wire", wire, "--diloco.combine", combine, "--num-replicas", "4"]
        for wire in ("fp32", "e3m0", "int4")
        for combine in ("gather", "reduce_scatter")
    },
}
MODEL = ["--model.width", "64", "--global-batch", "8", "--sequence-length", "256", "--num-tokens", "1048576"]


def main() -> None:
    arguments = parser(__doc__, seeds=(0, 1, 2)).parse_args()
    rows: list[dict] = []

    def run(variant: str, seed: int, rate: float) -> float:
        words = re.findall(r"[\w.]+", variant.replace("=", "").replace("α", "alpha"))
        name = f"{'-'.join(words)}-seed{seed}-lr{rate:g}"
        flags = [*MODEL, "--seed", str(seed), "--optimizer.learning-rate", str(rate), *VARIANTS[variant]]
        found = train(name, flags, arguments)
        rows.append({"variant": variant, "seed": seed, "learning_rate": rate, **found})
        write(rows, arguments.output)
        return found["eval_loss"]

    best = min(LEARNING_RATES, key=lambda rate: run("fp32", arguments.seeds[0], rate))
    for seed in arguments.seeds:
        for variant in VARIANTS:
            if (variant, seed) != ("fp32", arguments.seeds[0]):
                run(variant, seed, best)
    print_table([row for row in rows if row["learning_rate"] == best])


def print_table(rows: list[dict]) -> None:
    """Mean over the seeds, its ratio to FP32 with the same settings, and the range of that over the seeds."""
    losses = {(row["variant"], row["seed"]): row["eval_loss"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    print(f"{'variant':36} {'loss':>7} {'to FP32':>9} {'over the seeds':>19} {'MB sent':>8}")
    for variant in VARIANTS:
        baseline = ", ".join(["fp32", *(part for part in variant.split(", ")[1:] if "=" in part)])
        baseline = next(name for name in VARIANTS if name.startswith(baseline))
        ratios = [losses[variant, seed] / losses[baseline, seed] - 1 for seed in seeds]
        loss = statistics.mean(losses[variant, seed] for seed in seeds)
        sent = next(row["bytes_sent_per_replica"] for row in rows if row["variant"] == variant) / 1e6
        spread = f"{min(ratios):+.2%} … {max(ratios):+.2%}"
        print(f"{variant:36} {loss:7.4f} {statistics.mean(ratios):+9.2%} {spread:>19} {sent:8.2f}")


if __name__ == "__main__":
    main()
