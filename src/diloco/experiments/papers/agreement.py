"""The experiment of arXiv 2501.18512 on the agreement of the replicas' outer gradients."""

import itertools
import statistics
from collections.abc import Iterable, Sequence

from diloco.experiments.papers.comparison import Row, all_of, chosen, common, finished
from diloco.experiments.papers.experiment import (
    Experiment,
    Finding,
    LabelledConfigs,
    Panel,
    Point,
    curves,
    over_seeds,
    registered,
)
from diloco.experiments.papers.tiers import Tier
from diloco.experiments.runner.rows import CURVE, EMBEDDING_CURVE, TENTHS


@registered(order=11)
def outer_cosine(tier: Tier) -> Experiment:
    """The cosine between the replicas' outer gradients, over training and by block (Figures 18 and 19)."""

    def runs(seed: int) -> LabelledConfigs:
        for batch in tier.step_batches:
            for size in tier.sizes:
                yield {"size": size, "batch": batch}, tier.run(size=size, seed=seed, batch=batch)

    def finding(rows: Sequence[Row]) -> Finding:
        runs_of_it = [row for row in finished(rows) if "cosine_first_third" in row]
        if not runs_of_it:
            return Finding("no run", "cannot tell")
        begin, middle, end = (
            [row[f"{CURVE}{percent:02}"] for row in runs_of_it if f"{CURVE}{percent:02}" in row]
            for percent in (TENTHS[0], TENTHS[4], TENTHS[-1])
        )
        falls = [row["cosine_first_third"] > row["cosine_last_third"] for row in runs_of_it]
        smaller = list(_falls_with_size(runs_of_it, tier))
        first = [row["cosine_block_0"] == max(_of_blocks(row)) for row in runs_of_it if "cosine_block_0" in row]
        measured = (
            f"without embeddings {_range(begin)} in the first tenth of training, {_range(middle)} halfway, "
            f"{_range(end)} in the last; it falls from the first third to the last in {_count(falls)} runs, is "
            f"lower in the larger of two neighbouring sizes in {_count(smaller)} pairs, and highest in the first "
            f"block in {_count(first)} runs"
        )
        below_zero = [cosine < 0 for cosine in end]
        return Finding(measured, all_of(*map(common, (falls, smaller, first, below_zero))))

    return Experiment(
        name="outer_cosine",
        claim="Outer gradients of two replicas are slightly correlated at first, about 0.1, nearly orthogonal for "
        "most of training, and slightly opposed at its end, about −0.1; less correlated in larger models, and the "
        "most in the first block.",
        source="Figures 18 and 19",
        runs=over_seeds(tier, runs),
        panels=lambda rows: _panels(tier, rows),
        finding=finding,
        with_curves=True,
    )


def _panels(tier: Tier, rows: Sequence[Row]) -> list[Panel]:
    by_block = {
        size: [
            point._replace(x=block)
            for block in range(tier.sizes[size].model.num_layers)
            for point in curves(chosen(rows, size=size), "size", y=f"cosine_block_{block}").get("", [])
        ]
        for size in tier.sizes
    }
    most_steps = chosen(rows, batch=tier.step_batches[-1])
    label = "cosine between two replicas' outer gradients"
    part = "part of training"
    return [
        Panel(
            title="without embeddings", curves=_over_training(tier, most_steps, CURVE), x_label=part, y_label=label
        ),
        Panel(
            title="embeddings",
            curves=_over_training(tier, most_steps, EMBEDDING_CURVE),
            x_label=part,
            y_label=label,
        ),
        Panel(title="by block", x_label="block", y_label=label, curves=by_block),
    ]


def _over_training(tier: Tier, rows: Sequence[Row], column: str) -> dict[str, list[Point]]:
    return {
        size: [
            point._replace(x=percent / 100)
            for percent in TENTHS
            for point in curves(chosen(rows, size=size), "size", y=f"{column}{percent:02}").get("", [])
        ]
        for size in tier.sizes
    }


def _falls_with_size(rows: Sequence[Row], tier: Tier) -> Iterable[bool]:
    """For neighbouring sizes, at the same seed and batch: whether the larger has the lower mean over training."""
    for batch, seed in itertools.product(tier.step_batches, tier.seeds):
        means = [_mean(chosen(rows, size=size, batch=batch, seed=seed)) for size in tier.sizes]
        for one, next_size in itertools.pairwise(mean for mean in means if mean is not None):
            yield next_size < one


def _mean(rows: Sequence[Row]) -> float | None:
    thirds = [row[f"cosine_{part}_third"] for row in rows for part in ("first", "middle", "last")]
    return statistics.mean(thirds) if thirds else None


def _of_blocks(row: Row) -> list[float]:
    return [value for name, value in row.items() if name.startswith("cosine_block_")]


def _range(cosines: Sequence[float]) -> str:
    return f"{min(cosines):.2f} … {max(cosines):.2f}" if cosines else "not measured"


def _count(answers: Sequence[bool]) -> str:
    return f"{sum(answers)} of {len(answers)}"
