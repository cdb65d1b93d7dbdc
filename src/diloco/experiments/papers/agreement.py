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

_PUBLISHED, _NEAR = (0.1, 0.0, -0.1), 0.05
"""The paper's cosines in the first tenth of training, halfway and in the last, read from its figure."""


@registered(order=11)
def outer_cosine(tier: Tier) -> Experiment:
    """The cosine between the replicas' outer gradients, over training and by block (Figures 18 and 19)."""

    def runs(seed: int) -> LabelledConfigs:
        for batch in tier.step_batches:
            for size in tier.sizes:
                yield {"size": size, "batch": batch}, tier.run(size=size, seed=seed, batch=batch)

    def finding(rows: Sequence[Row]) -> Finding:
        curves_of_runs = [curve for row in finished(rows) if (curve := _curve(row))]
        if not curves_of_runs:
            return Finding("no run", "cannot tell")
        begin, middle, end = ([curve[part] for curve in curves_of_runs] for part in (0, 4, -1))
        falls = [curve[0] > curve[-1] for curve in curves_of_runs]
        smaller = list(_falls_with_size(rows, tier))
        first = [
            row["cosine_block_0"] == max(_of_blocks(row)) for row in finished(rows) if "cosine_block_0" in row
        ]
        near = [
            abs(cosine - value) <= _NEAR
            for value, part in zip(_PUBLISHED, (begin, middle, end), strict=True)
            for cosine in part
        ]
        measured = (
            f"without embeddings {_range(begin)} in the first tenth of training, {_range(middle)} halfway, "
            f"{_range(end)} in the last, within {_NEAR} of the paper's in {_count(near)}; it falls in "
            f"{_count(falls)} runs, is lower in the larger of two neighbouring sizes in {_count(smaller)} pairs, "
            f"and highest in the first block in {_count(first)} runs"
        )
        num_runs = len(tier.seeds) * len(tier.step_batches) * len(tier.sizes)
        is_complete = "agrees" if len(curves_of_runs) == num_runs else "cannot tell"
        return Finding(measured, all_of(is_complete, *map(common, (falls, smaller, first, near))))

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
    most_steps = chosen(rows, batch=tier.step_batches[-1])
    by_block = {
        size: [
            point._replace(x=block)
            for block in range(tier.sizes[size].model.num_layers)
            for point in curves(chosen(most_steps, size=size), "size", y=f"cosine_block_{block}").get("", [])
        ]
        for size in tier.sizes
    }
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
        for one, next_size in itertools.pairwise(means):
            if one is not None and next_size is not None:
                yield next_size < one


def _mean(rows: Sequence[Row]) -> float | None:
    cosines = [cosine for row in rows for cosine in _curve(row)]
    return statistics.mean(cosines) if cosines else None


def _curve(row: Row) -> list[float]:
    """The cosine of the blocks in each tenth of training; empty where they were not measured."""
    names = [f"{CURVE}{percent:02}" for percent in TENTHS]
    return [row[name] for name in names] if all(name in row for name in names) else []


def _of_blocks(row: Row) -> list[float]:
    return [value for name, value in row.items() if name.startswith("cosine_block_")]


def _range(cosines: Sequence[float]) -> str:
    return f"{min(cosines):.2f} … {max(cosines):.2f}" if cosines else "not measured"


def _count(answers: Sequence[bool]) -> str:
    return f"{sum(answers)} of {len(answers)}"
