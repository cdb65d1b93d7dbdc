"""Experiments of the scaling-laws paper (arXiv 2503.09799) that compare settings; the laws are in scaling/."""

from collections.abc import Sequence
from typing import Any

from diloco.experiments.papers import published
from diloco.experiments.papers.comparison import Change, Row, all_of, change, chosen, common, flops
from diloco.experiments.papers.experiment import (
    Experiment,
    Finding,
    LabelledConfigs,
    Panel,
    accuracy_panels,
    curves,
    over_seeds,
    registered,
)
from diloco.experiments.papers.tiers import BASELINE, DILOCO, Tier


@registered(order=12)
def sync_cadence(tier: Tier) -> Experiment:
    """H and the outer learning rate, for DiLoCo (Figures 8 and 9)."""
    rates = (0.2, 0.4, 0.6, 0.8, 1.0)
    periods = tuple(period for period in tier.sync_everies if period in (5, 30, 100))

    def runs(seed: int) -> LabelledConfigs:
        for period in periods:
            for rate in rates:
                config = tier.run(DILOCO, seed=seed, sync_every=period, outer_learning_rate=rate)
                yield {"H": period, "outer_learning_rate": rate}, config

    def finding(rows: Sequence[Row]) -> Finding:
        best = {seed: [_best_rate(chosen(rows, H=h, seed=seed)) for h in periods] for seed in tier.seeds}
        complete = [of_seed for of_seed in best.values() if None not in of_seed]
        listed = ", ".join(
            f"{' and '.join(dict.fromkeys(f'{of_seed[i]:g}' for of_seed in complete))} at H = {period}"
            for i, period in enumerate(periods)
        )
        rises = [of_seed == sorted(of_seed) and of_seed[0] < of_seed[-1] for of_seed in complete]
        verdict = common(rises) if len(rises) > 1 else "cannot tell"
        edges = f" (of {rates[0]:g} to {rates[-1]:g}, in each seed)"
        return Finding(f"best outer learning rate: {listed}{edges}" if complete else "no run", verdict)

    return Experiment(
        name="sync_cadence",
        claim="The best outer learning rate rises with H.",
        source="Figures 8 and 9",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="H", x_label="outer learning rate η", curves=curves(rows, "outer_learning_rate", "H"))
        ],
        finding=finding,
    )


def _best_rate(rows: Sequence[Row]) -> Any:
    return min(rows, key=lambda row: row["eval_loss"])["outer_learning_rate"] if rows else None


@registered(order=13)
def batch_size(tier: Tier) -> Experiment:
    """The global batch, for Data-Parallel and DiLoCo with one to four replicas (Figures 3 to 5).

    The paper takes the best learning rate at each batch; we multiply the size's rate by the square root of the
    batch's multiple.
    """

    def runs(seed: int) -> LabelledConfigs:
        for batch in tier.batches:
            config = tier.run(BASELINE, seed=seed, batch=batch)
            yield {"method": "Data-Parallel", "batch_tokens": config.tokens_per_step}, config
            for replicas in (1, 2, 4):
                config = tier.run(DILOCO, num_replicas=replicas, seed=seed, batch=batch)
                yield {"method": f"DiLoCo, M={replicas}", "batch_tokens": config.tokens_per_step}, config

    def finding(rows: Sequence[Row]) -> Finding:
        small, large = (tier.run(batch=batch).tokens_per_step for batch in (tier.batches[0], tier.batches[-1]))
        costs = {
            method: change(
                rows,
                {"method": method, "batch_tokens": large},
                {"method": method, "batch_tokens": small},
            )
            for method in ("Data-Parallel", "DiLoCo, M=1", "DiLoCo, M=2", "DiLoCo, M=4")
        }
        baseline, *others = costs.values()
        listed = "; ".join(f"{method} {cost}" for method, cost in costs.items())
        verdict = all_of(*(baseline.rises_over(other) for other in others))
        return Finding(f"a batch of {large} tokens over {small}: {listed}", verdict)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        labels = {"x_label": "global batch, tokens", "x_log": True}
        losses = Panel(title="", curves=curves(rows, "batch_tokens", "method"), **labels)
        return [losses, *accuracy_panels(rows, "batch_tokens", "method", **labels)]

    return Experiment(
        name="batch_size",
        claim="Larger batches cost DiLoCo less loss than Data-Parallel, already with one replica.",
        source="Figures 3 to 5",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
        with_accuracy=True,
    )


@registered(order=14)
def single_replica(tier: Tier) -> Experiment:
    """DiLoCo with one replica, a Lookahead variant, beside Data-Parallel (Finding 2)."""

    def runs(seed: int) -> LabelledConfigs:
        for size in tier.sizes:
            yield {"method": BASELINE, "size": size}, tier.run(BASELINE, size=size, seed=seed)
            yield {"method": DILOCO, "size": size}, tier.run(DILOCO, num_replicas=1, size=size, seed=seed)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        labels = {"x_label": "floating-point operations, 6·N·tokens", "x_log": True}
        theirs = curves(published.SINGLE_REPLICA, "flops", "method")
        return [
            Panel(title="here", curves=curves(rows, flops, "method"), **labels),
            Panel(title="arXiv 2503.09799, Table 4", curves=theirs, published=True, **labels),
            *accuracy_panels(rows, flops, "method", **labels),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        gaps = {
            size: change(rows, {"method": DILOCO, "size": size}, {"method": BASELINE, "size": size})
            for size in tier.sizes
        }
        listed = ", ".join(f"{gap} at {size}" for size, gap in gaps.items())
        lower = (Change({seed: -value for seed, value in gap.by_seed.items()}).rises() for gap in gaps.values())
        return Finding(f"M = 1 over Data-Parallel: {listed}", all_of(*lower))

    return Experiment(
        name="single_replica",
        claim="DiLoCo with a single replica ends below Data-Parallel's loss at every size.",
        source="Finding 2, Table 4",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
        with_accuracy=True,
    )
