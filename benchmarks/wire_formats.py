"""Held-out loss with every codec, with error feedback, with four replicas and with reduce_scatter.

    python benchmarks/wire_formats.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

A model of 0.3M parameters, 1,048,576 tokens a run, everything but the codec the same. The learning rate is the
best of a grid for FP32 on the wire and the first seed. A finished run is not run again, an interrupted one is
resumed. Writes DIR/results.csv after every run and prints mean and spread over the seeds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training_runs import base_config, finish, parser

from diloco.experiments.runner.grid import LabelledRun

LEARNING_RATES = (0.002, 0.004, 0.008, 0.016)
DENSE = ("fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "e3m0", "int8", "int4", "int2")
SPARSE = ("topk", "feddropout", "dare")
FEEDBACK = {"error_feedback": 1.0}
NO_MIXING = {"mixing": 0.0}
AVERAGING = NO_MIXING | {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
OFTEN = AVERAGING | {"sync_every": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    **{wire: {"wire": wire} for wire in (*DENSE, *SPARSE)},
    **{
        f"{wire}, error feedback": {"wire": wire, **FEEDBACK}
        for wire in ("e2m1", "e3m0", "int4", "int2", "topk", "feddropout")
    },
    **{f"{wire}:density=0.25": {"wire": f"{wire}:density=0.25"} for wire in SPARSE},
    "fp32, α=0": {"wire": "fp32", **NO_MIXING},
    "topk, α=0": {"wire": "topk", **NO_MIXING},
    "topk, error feedback, α=0": {"wire": "topk", **NO_MIXING, **FEEDBACK},
    "feddropout, error feedback, α=0": {"wire": "feddropout", **NO_MIXING, **FEEDBACK},
    "fp32, α=0, η=1, μ=0": {"wire": "fp32", **AVERAGING},
    "topk, α=0, η=1, μ=0": {"wire": "topk", **AVERAGING},
    "topk, error feedback, α=0, η=1, μ=0": {"wire": "topk", **AVERAGING, **FEEDBACK},
    "fp32, α=0, η=1, μ=0, H=5": {"wire": "fp32", **OFTEN},
    "topk, α=0, η=1, μ=0, H=5": {"wire": "topk", **OFTEN},
    "topk, error feedback, α=0, η=1, μ=0, H=5": {"wire": "topk", **OFTEN, **FEEDBACK},
    "dare:density=0.75": {"wire": "dare:density=0.75"},
    "dare:density=0.75, error feedback": {"wire": "dare:density=0.75", **FEEDBACK},
    **{f"{wire}, stochastic": {"wire": f"{wire}:stochastic=true"} for wire in ("e3m0", "int4", "int2")},
    **{
        f"{wire}, M=4, {combine}": {"wire": wire, "combine": combine, "num_replicas": 4}
        for wire in ("fp32", "e3m0", "int4")
        for combine in ("gather", "reduce_scatter")
    },
}
"""Fields of DilocoConfig by name, and the number of replicas."""


def main() -> None:
    options = parser(__doc__, seeds=(0, 1, 2), learning_rates=LEARNING_RATES)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--steps", type=int, default=512)
    options.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT"
    )
    arguments = options.parse_args()
    base = base_config(arguments, num_steps=arguments.steps)
    base = replace(base, model=replace(base.model, width=arguments.width))

    def run(variant: str, seed: int, rate: float) -> LabelledRun:
        diloco: dict[str, Any] = {"num_replicas": base.num_replicas, **VARIANTS[variant]}
        config = replace(
            base,
            seed=seed,
            num_replicas=diloco.pop("num_replicas"),
            optimizer=replace(base.optimizer, learning_rate=rate),
            diloco=replace(base.diloco, **diloco),
        )
        return LabelledRun(labels={"variant": variant, "seed": seed, "learning_rate": rate}, config=config)

    grid = [run("fp32", arguments.seeds[0], rate) for rate in arguments.learning_rates]
    best = min(finish(grid, arguments.output), key=lambda row: row["eval_loss"])["learning_rate"]
    others = [run(variant, seed, best) for seed in arguments.seeds for variant in arguments.variants]
    rows = finish(list({one.config: one for one in grid + others}.values()), arguments.output)
    print_table([row for row in rows if row["learning_rate"] == best], arguments.variants)


def print_table(rows: Sequence[dict[str, Any]], variants: Sequence[str]) -> None:
    """Print the mean over the seeds, its ratio to FP32 with the same settings, and the ratio's range."""
    losses = {(row["variant"], row["seed"]): row["eval_loss"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    print(f"{'variant':36} {'loss':>7} {'to FP32':>9} {'over the seeds':>19} {'MB sent':>8}")
    for variant in variants:
        baseline = ", ".join(["fp32", *(part for part in variant.split(", ")[1:] if "=" in part)])
        baseline = next(name for name in VARIANTS if name.startswith(baseline))
        ratios = [losses[variant, seed] / losses[baseline, seed] - 1 for seed in seeds]
        loss = statistics.mean(losses[variant, seed] for seed in seeds)
        sent = next(row["bytes_sent_per_replica"] for row in rows if row["variant"] == variant) / 1e6
        spread = f"{min(ratios):+.2%} … {max(ratios):+.2%}"
        print(f"{variant:36} {loss:7.4f} {statistics.mean(ratios):+9.2%} {spread:>19} {sent:8.2f}")


if __name__ == "__main__":
    main()
