"""The experiments of the scaling-laws paper (arXiv 2503.09799) that compare settings; the laws are in scaling/."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco.experiments.papers.comparison import (
    Change,
    Row,
    all_of,
    at_best,
    change,
    chosen,
    common,
    flops,
    of_bands,
    placed,
)
from diloco.experiments.papers.experiment import (
    Experiment,
    Finding,
    Panel,
    accuracy_panels,
    curves,
    over_seeds,
    wall_clock_panels,
)
from diloco.experiments.papers.tiers import BASELINE, DILOCO, BatchGrid, CadenceGrid, Tier
from diloco.experiments.runner.grid import LabelledRun
from diloco.scaling.gap_laws import diloco_gap, larger_batch_from
from diloco.scaling.table import published_table
from diloco.training.config.config import TrainConfig


def sync_cadence(tier: Tier) -> Experiment:
    """H and the outer learning rate of DiLoCo, for several M and sizes (Figures 8 and 9)."""

    def runs() -> Iterator[LabelledRun]:
        for grid in tier.cadence_grids:
            for period, rate in itertools.product(grid.sync_everies, grid.outer_learning_rates):
                fields = {"sync_every": period, "outer_learning_rate": rate}
                config = tier.run(DILOCO, size=grid.size, num_replicas=grid.replicas, **fields)
                labels = {"size": grid.size, "replicas": grid.replicas}
                yield LabelledRun({**labels, "H": period, "outer_learning_rate": rate}, config)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        best = at_best(rows, "outer_learning_rate", "size", "replicas", "H")
        labels = {"x_label": "H, inner steps per round", "x_log": True}
        first = tier.cadence_grids[0]
        of_first = chosen(rows, size=first.size, replicas=first.replicas)
        return [
            Panel(
                title="best outer learning rate",
                y_label="η",
                curves=curves(best, "H", _setting, y="outer_learning_rate"),
                **labels,
            ),
            Panel(title="loss at the best η", curves=curves(best, "H", _setting), **labels),
            Panel(title="H", x_label="outer learning rate η", curves=curves(of_first, "outer_learning_rate", "H")),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        listed, rises = [], []
        for grid in tier.cadence_grids:
            best = [_best_rates(rows, grid, seed) for seed in tier.seeds]
            complete = [of_seed for of_seed in best if None not in of_seed]
            if complete:
                listed.append(f"{_name(grid)} {_rates(complete, grid)}")
            rises.append([of_seed == sorted(of_seed) and of_seed[0] < of_seed[-1] for of_seed in complete])
        verdicts = [common(of_grid) if len(of_grid) > 1 else "cannot tell" for of_grid in rises]
        if not listed:
            return Finding("no run", "cannot tell")
        costs = [_cost_of_period(rows, grid) for grid in tier.cadence_grids]
        over = ", ".join(f"{_name(grid)} {cost}" for grid, cost in zip(tier.cadence_grids, costs, strict=True))
        first, one, *_, larger = costs
        measured = (
            f"best outer learning rate, in each seed: {'; '.join(listed)}; loss at H = {_LONG} over {_SHORT}, "
            f"each at its best rate: {over}"
        )
        verdict = (
            f"{all_of(*verdicts)}; a long H costs less with one replica: {first.rises_over(one)}, and in a larger "
            f"model: {first.rises_over(larger)}"
        )
        return Finding(measured, verdict)

    return Experiment(
        name="sync_cadence",
        claim="The best outer learning rate rises with H, for every M and size. The loss rises with H, less so "
        "with one replica and in larger models.",
        source="Figures 8 and 9",
        runs=over_seeds(tier, runs()),
        panels=panels,
        finding=finding,
    )


def _setting(row: Row) -> str:
    return f"{row.get('size')}, M={row.get('replicas')}"


def _name(grid: CadenceGrid) -> str:
    return f"{grid.size}, M = {grid.replicas}:"


def _best_rates(rows: Sequence[Row], grid: CadenceGrid, seed: int) -> list[Any]:
    """The best η at each H; None where there is no run."""
    of_grid = chosen(rows, size=grid.size, replicas=grid.replicas, seed=seed)
    by_period = [at_best(chosen(of_grid, H=period), "outer_learning_rate") for period in grid.sync_everies]
    return [best[0]["outer_learning_rate"] if best else None for best in by_period]


def _cost_of_period(rows: Sequence[Row], grid: CadenceGrid) -> Change:
    """The loss at a long H over that at a short one, each at its best η."""
    best = at_best(chosen(rows, size=grid.size, replicas=grid.replicas), "outer_learning_rate", "H")
    return change(best, {"H": _LONG}, {"H": _SHORT})


_SHORT, _LONG = 5, 100


def _rates(best: Sequence[Sequence[float]], grid: CadenceGrid) -> str:
    return ", ".join(
        f"{' and '.join(dict.fromkeys(f'{of_seed[i]:g}' for of_seed in best))} at H = {period}"
        for i, period in enumerate(grid.sync_everies)
    )


def batch_size(tier: Tier) -> Experiment:
    """The global batch, for Data-Parallel and DiLoCo with one to eight replicas (Figures 3 to 6, 14 to 19).

    The paper takes the best learning rate at each batch. Where a grid has one, it is the size's rate times the
    square root of the batch's multiple.
    """

    def runs() -> Iterator[LabelledRun]:
        for grid in tier.batch_grids:
            for batch, rate in itertools.product(grid.batches, grid.rates):
                options = {"size": grid.size, "batch": batch, "rate": rate, "tokens": grid.tokens}
                for replicas in (0, *grid.replicas):
                    config = _config(tier, replicas, options)
                    labels = {"batch_tokens": config.tokens_per_step, "multiple": grid.tokens, "rate": rate}
                    yield LabelledRun({"method": _method(replicas), "size": grid.size, **labels}, config)

    def finding(rows: Sequence[Row]) -> Finding:
        listed, verdict = [], "cannot tell"
        for grid in tier.batch_grids:
            small, large = (
                tier.run(size=grid.size, batch=edge).tokens_per_step
                for edge in (min(grid.batches), max(grid.batches))
            )
            best = _best_rows(rows, grid)
            baseline, *others = (
                change(chosen(best, method=_method(replicas)), {"batch_tokens": large}, {"batch_tokens": small})
                for replicas in (0, *grid.replicas)
            )
            costs = zip((0, *grid.replicas), (baseline, *others), strict=True)
            named = ", ".join(f"{_method(replicas)} {cost}" for replicas, cost in costs)
            listed.append(f"{grid.size}, {large} tokens over {small}, {grid.tokens}× the token budget: {named}")
            begins = {replicas: larger_batch_from(replicas) for replicas in grid.replicas}
            num_params = max((float(row["num_params"]) for row in best), default=0.0)
            tested = [
                baseline.rises_over(other)
                for replicas, other in zip(grid.replicas, others, strict=True)
                if num_params >= begins[replicas]
            ]
            verdict = all_of(*tested) if tested else _not_at_this_size(begins)
        return Finding("; ".join(listed), verdict)

    return Experiment(
        name="batch_size",
        claim="Larger batches cost DiLoCo less loss than Data-Parallel, already with one replica, from the size "
        "on at which the laws of the best batch (Table 9) cross.",
        source="Figures 3 to 6 and 14 to 19",
        with_accuracy=True,
        runs=over_seeds(tier, runs()),
        panels=lambda rows: _batch_panels(tier, rows),
        finding=finding,
    )


def _not_at_this_size(begins: Mapping[int, float]) -> str:
    at = ", ".join(f"{num_params / 1e6:.3g}M parameters with M = {m}" for m, num_params in begins.items())
    return f"the claim begins at {at}: it can't be tested at this size"


def _batch_panels(tier: Tier, rows: Sequence[Row]) -> list[Panel]:
    labels = {"x_label": "global batch, tokens", "x_log": True}
    compared = [row for row in _best_rows(rows, tier.batch_grids[0]) if row["method"] in map(_method, (0, 1, 2))]
    return [
        *(
            Panel(
                title=f"{grid.size}, {grid.tokens}× the token budget",
                curves=curves(_best_rows(rows, grid), "batch_tokens", "method"),
                **labels,
            )
            for grid in tier.batch_grids
        ),
        *wall_clock_panels(
            compared,
            lambda row: row["method"],
            lambda row: _REPLICAS[row["method"]],
            lambda _: tier.sync_every,
        ),
        *accuracy_panels(_best_rows(rows, tier.batch_grids[0]), "batch_tokens", "method", **labels),
    ]


def _best_rows(rows: Sequence[Row], grid: BatchGrid) -> list[Row]:
    return at_best(chosen(rows, size=grid.size, multiple=grid.tokens), "rate", "method", "batch_tokens")


def _method(replicas: int) -> str:
    return f"DiLoCo, M={replicas}" if replicas else "Data-Parallel"


_REPLICAS = {_method(replicas): replicas for replicas in (0, 1, 2, 4, 8)}


def _config(tier: Tier, replicas: int, options: dict[str, Any]) -> TrainConfig:
    """The run of DiLoCo with M replicas; 0 is Data-Parallel."""
    return tier.run(DILOCO, num_replicas=replicas, **options) if replicas else tier.run(BASELINE, **options)


def single_replica(tier: Tier) -> Experiment:
    """DiLoCo with one replica, a Lookahead variant, beside Data-Parallel (Finding 2)."""
    longest = tier.batch_grids[-1]
    most_steps = tier.step_batches[-1]

    def runs() -> Iterator[LabelledRun]:
        settings = [(size, batch, 1, 1) for size in tier.sizes for batch in tier.step_batches]
        if longest.tokens > 1:
            grid = itertools.product(longest.batches, longest.rates)
            settings += [(tier.base, batch, longest.tokens, rate) for batch, rate in grid]
        for size, batch, tokens, rate in settings:
            options = {"size": size, "batch": batch, "tokens": tokens, "rate": rate}
            labels = {"size": size, "batch": batch, "multiple": tokens, "rate": rate}
            for replicas, method in _METHODS.items():
                yield LabelledRun({"method": method, **labels}, _config(tier, replicas, options))

    def finding(rows: Sequence[Row]) -> Finding:
        law = diloco_gap(1)
        gaps = {
            (size, batch): placed(
                chosen(rows, size=size, batch=batch, multiple=1), {"method": DILOCO}, {"method": BASELINE}, law
            )
            for size in tier.sizes
            for batch in tier.step_batches
        }
        listed = [
            f"{gap if batch == most_steps else gap.gap} at {size} in {_num_steps(tier, size, batch)} steps"
            for (size, batch), gap in gaps.items()
        ]
        verdict = of_bands(gaps[size, most_steps].verdict for size in tier.sizes)
        if longest.tokens > 1:
            best = at_best(chosen(rows, multiple=longest.tokens), "rate", "method", "batch")
            longer = change(at_best(best, "batch", "method"), {"method": DILOCO}, {"method": BASELINE})
            listed.append(
                f"{longer} at {tier.base} with {longest.tokens}× the tokens, each at its best batch and rate"
            )
        return Finding(f"M = 1 over Data-Parallel: {', '.join(listed)}", verdict)

    return Experiment(
        name="single_replica",
        claim="DiLoCo with a single replica ends below Data-Parallel's loss from 35M parameters on. By the law of "
        "the gap it does so above 9.4M, and is up to 0.4 % above it in smaller models.",
        source="Finding 2, Figure 3, Table 4",
        with_accuracy=True,
        runs=over_seeds(tier, runs()),
        panels=lambda rows: _single_replica_panels(tier, rows),
        finding=finding,
    )


_METHODS = {0: BASELINE, 1: DILOCO}


def _single_replica_panels(tier: Tier, rows: Sequence[Row]) -> list[Panel]:
    labels = {"x_label": "floating-point operations, 6·N·tokens", "x_log": True}
    published = [
        {"method": _METHODS[p.replicas], "flops": 6 * p.params * 20 * p.params, "eval_loss": p.eval_loss}
        for p in published_table()
        if p.replicas in _METHODS
    ]
    theirs = curves(published, "flops", "method")
    over_sizes = chosen(rows, batch=tier.step_batches[-1], multiple=1)
    return [
        Panel(title="here", curves=curves(over_sizes, flops, "method"), **labels),
        Panel(title="arXiv 2503.09799, Table 4", curves=theirs, published=True, **labels),
        *accuracy_panels(over_sizes, flops, "method", **labels),
    ]


def _num_steps(tier: Tier, size: str, batch: float) -> int:
    return tier.run(size=size, batch=batch).num_steps


EXPERIMENTS = (sync_cadence, batch_size, single_replica)
