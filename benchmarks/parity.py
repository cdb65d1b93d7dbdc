"""Streaming DiLoCo against Data-Parallel in runs of 20 tokens a parameter, each at its best learning rate.

    python benchmarks/parity.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

1.2M parameters and 23,730 steps of 4 sequences of 256 tokens, as many steps as the papers' runs have. With the
first seed both methods train at a grid of learning rates, extended while a method's best lies on its edge; then
come, at the best rates, the other seeds, H = 100, τ = 5 and 10, and M = 4 with η = 0.4 and 0.8. Data-Parallel
trains in one process, whose gradient of the whole batch is the average that replicas would exchange.

The first runs say most. DIR/results.csv is written after every run, and a run in it is not run again, even on
another disk; an interrupted run is resumed, so the command may be stopped at any time.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training_runs import base_config, best_rate, finish, parser, rate_beyond_edge

from diloco.experiments.papers.comparison import change, chosen
from diloco.experiments.runner.grid import LabelledRun
from diloco.training.config.config import CheckpointConfig, TrainConfig

LEARNING_RATES = (0.00141, 0.001, 0.002)
"""The best for 8 sequences a step, 0.002, divided by √2 for 4; then its neighbours (docs/results/quality.md)."""
BASELINE, STREAMING = TUNED = ("data_parallel", "streaming")
"""Variants with a learning rate of their own; the others take that of STREAMING."""
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    STREAMING: {},
    "sync_every_100": {"sync_every": 100},
    "overlap_steps_5": {"overlap_steps": 5},
    "overlap_steps_10": {"overlap_steps": 10},
    "num_replicas_4": {"num_replicas": 4},
    "num_replicas_4_outer_0.8": {"num_replicas": 4, "outer_learning_rate": 0.8},
    "num_replicas_4_outer_0.8_sync_every_100": {"num_replicas": 4, "outer_learning_rate": 0.8, "sync_every": 100},
}
"""The difference of each variant from Streaming DiLoCo with M = 2, H = 30, P = 3, τ = 1, η = 0.4 and E3M0."""
NUM_SEEDS = {"overlap_steps_5": 2, "overlap_steps_10": 2}
"""The seeds of the variants that train with fewer than all."""
Setting = tuple[str, int, float]
"""Variant, seed and learning rate."""


def main() -> None:
    options = parser(__doc__, seeds=(0, 1, 2), learning_rates=LEARNING_RATES)
    options.add_argument("--steps", type=int, default=23_730)
    further = [variant for variant in VARIANTS if variant not in TUNED]
    options.add_argument("--variants", nargs="*", choices=further, default=further, help="beside the tuned ones")
    arguments = options.parse_args()
    base = base_config(arguments, global_batch=4, num_steps=arguments.steps)
    base = replace(base, checkpoint=CheckpointConfig(every_steps=1000), log_layer_cosine=True)
    runs: dict[Setting, LabelledRun] = {}

    def train(*settings: Setting) -> list[dict[str, Any]]:
        """The rows of all settings so far, after training what is new of them."""
        runs.update({setting: run(base, *setting) for setting in settings})
        return finish(list(runs.values()), arguments.output)

    (first, *others), rates = arguments.seeds, arguments.learning_rates
    # Two runs of Data-Parallel fill two cores, as one of Streaming does.
    train(*((BASELINE, first, rate) for rate in rates[:2]), (STREAMING, first, rates[0]))
    rows = train(*((variant, first, rate) for rate in rates for variant in TUNED))
    while beyond := {variant: rate for variant in TUNED if (rate := rate_beyond_edge(rows, variant))}:
        rows = train(*((variant, first, rate) for variant, rate in beyond.items()))
    best = {variant: best_rate(rows, variant) for variant in TUNED}
    best |= dict.fromkeys(arguments.variants, best[STREAMING])
    train(*((variant, seed, best[variant]) for variant in TUNED for seed in others))
    rows = train(*((v, seed, best[v]) for v in arguments.variants for seed in arguments.seeds[: NUM_SEEDS.get(v)]))
    compare(rows, best)


def run(base: TrainConfig, variant: str, seed: int, rate: float) -> LabelledRun:
    fields = dict(VARIANTS[variant])
    is_baseline = variant == BASELINE
    config = replace(
        base,
        method=BASELINE if is_baseline else "streaming_overlapped_fp4",
        num_replicas=fields.pop("num_replicas", 1 if is_baseline else 2),
        seed=seed,
        optimizer=replace(base.optimizer, learning_rate=rate),
        diloco=replace(base.diloco, **fields),
    )
    return LabelledRun(labels={"variant": variant, "seed": seed, "learning_rate": rate}, config=config)


def compare(rows: Sequence[dict[str, Any]], best: dict[str, float]) -> None:
    """Print each variant at its learning rate beside Data-Parallel at its own: seed by seed, and the bytes."""
    of_baseline = {"variant": BASELINE, "learning_rate": best[BASELINE]}
    print(
        f"{'variant':16} {'rate':>8} {'loss':>8}  {'to Data-Parallel':28} fewer bytes than FP32, 2-byte gradients"
    )
    for variant, rate in best.items():
        labels = {"variant": variant, "learning_rate": rate}
        at_rate = chosen(rows, **labels)
        loss = statistics.mean(row["eval_loss"] for row in at_rate)
        line = f"{variant:16} {rate:8g} {loss:8.4f}"
        if variant != BASELINE:
            fewer = at_rate[0]["data_parallel_bytes_per_replica"] / at_rate[0]["bytes_sent_per_replica"]
            line += f"  {change(rows, labels, of_baseline)!s:28} {fewer:.0f}×, {fewer / 2:.0f}×"
        print(line)


if __name__ == "__main__":
    main()
