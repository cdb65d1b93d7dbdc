"""Experiments of Streaming DiLoCo (arXiv 2501.18512) on replicas: number, H, slack, which parameters to take."""

from collections.abc import Sequence
from dataclasses import replace

from diloco.experiments.papers import published
from diloco.experiments.papers.comparison import Change, Row, all_of, change, chosen, finished
from diloco.experiments.papers.experiment import (
    Experiment,
    Finding,
    LabelledConfigs,
    Panel,
    Point,
    accuracy_panels,
    curves,
    over_seeds,
    registered,
)
from diloco.experiments.papers.tiers import DILOCO, STREAMING, Tier
from diloco.experiments.runner.grid import LabelledRun
from diloco.presets import Method

_NAMES: dict[Method, str] = {DILOCO: "DiLoCo", STREAMING: "Streaming"}


@registered(order=7)
def num_replicas(tier: Tier) -> Experiment:
    """One to eight replicas, at a constant global batch and at a constant local one (Figure 11)."""

    def runs(seed: int) -> LabelledConfigs:
        for method in _NAMES:
            for constant in ("global", "local"):
                for replicas in (1, 2, 4, 8):
                    batch = 1 if constant == "global" else replicas / 2
                    config = tier.run(method, num_replicas=replicas, seed=seed, batch=batch)
                    yield {"method": method, "constant_batch": constant, "replicas": replicas}, config

    def panels(rows: Sequence[Row]) -> list[Panel]:
        return [
            Panel(
                title=f"constant {constant} batch",
                x_label="replicas",
                curves=curves(chosen(rows, constant_batch=constant), "replicas", "method"),
            )
            for constant in ("global", "local")
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        gaps = {
            (method, constant): change(
                chosen(rows, method=method, constant_batch=constant), {"replicas": 8}, {"replicas": 2}
            )
            for method in _NAMES
            for constant in ("global", "local")
        }
        listed = "; ".join(
            f"{name} {gaps[method, 'global']} at a constant global batch, {gaps[method, 'local']} at a local one"
            for method, name in _NAMES.items()
        )
        return Finding(f"M = 8 over M = 2: {listed}", all_of(*(gap.rises() for gap in gaps.values())))

    return Experiment(
        name="num_replicas",
        claim="At a fixed token budget loss rises with the number of replicas, with either batch held constant, "
        "for DiLoCo and Streaming alike.",
        source="Figure 11",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
    )


@registered(order=8)
def sync_every(tier: Tier) -> Experiment:
    """H, for DiLoCo and for Streaming DiLoCo, from 5 (Figure 12)."""

    def runs(seed: int) -> LabelledConfigs:
        for method in _NAMES:
            for period in tier.sync_everies:
                yield {"method": method, "H": period}, tier.run(method, seed=seed, sync_every=period)

    def finding(rows: Sequence[Row]) -> Finding:
        first, second, *_, last = tier.sync_everies
        middle = tier.sync_every
        over = {
            (method, period): change(rows, {"method": method, "H": period}, {"method": method, "H": middle})
            for method in _NAMES
            for period in (first, second, last)
        }
        beside = change(rows, {"method": STREAMING, "H": middle}, {"method": DILOCO, "H": middle})
        listed = "; ".join(
            f"H = {period}: DiLoCo {over[DILOCO, period]}, Streaming {over[STREAMING, period]}"
            for period in (last, second, first)
        )
        verdict = all_of(
            over[DILOCO, last].rises(),
            over[STREAMING, last].rises(),
            beside.at_most(0.01),
            over[DILOCO, first].rises_over(over[STREAMING, first]),
        )
        measured = f"over H = {middle}: {listed}; Streaming over DiLoCo at H = {middle}: {beside}"
        return Finding(measured, verdict)

    return Experiment(
        name="sync_every",
        claim="Loss rises slowly with H beyond 30, for DiLoCo and Streaming alike; to a low H Streaming is more "
        "robust.",
        source="Figure 12",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="", x_label="H, inner steps a round", x_log=True, curves=curves(rows, "H", "method"))
        ],
        finding=finding,
    )


_COLUMNS = {
    "outer_parameters": "eval_loss",
    "replica_average": "eval_loss_average",
    "first_replica": "eval_loss_replica",
}
"""The column of the loss of each set of parameters."""


@registered(order=9)
def evaluated_parameters(tier: Tier) -> Experiment:
    """Losses of the outer parameters, a replica's own, and the average, at the end and halfway (Table 4)."""
    settings = [(replicas, at) for replicas in (2, 4) for at in ("end", "half")]

    def runs(seed: int) -> LabelledConfigs:
        for replicas, at in settings:
            config = tier.run(num_replicas=replicas, seed=seed)
            if at == "half":
                config = replace(config, checkpoint=replace(config.checkpoint, every_steps=config.num_steps // 2))
            yield {"replicas": replicas, "at": at}, config

    def labelled_runs() -> list[LabelledRun]:
        return [
            replace(run, at_step=run.config.num_steps // 2) if run.labels["at"] == "half" else run
            for run in over_seeds(tier, runs)
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        over = {
            (name, *setting): Change(
                {
                    row["seed"]: float(row[column]) / float(row["eval_loss"]) - 1
                    for row in chosen(rows, replicas=setting[0], at=setting[1])
                    if column in row
                }
            )
            for setting in settings
            for name, column in _COLUMNS.items()
            if name != "outer_parameters"
        }
        listed = "; ".join(
            f"M = {replicas}, {at}: average {over['replica_average', replicas, at]}, "
            f"first replica {over['first_replica', replicas, at]}"
            for replicas, at in settings
        )
        return Finding(f"over the outer parameters: {listed}", all_of(*(gap.rises() for gap in over.values())))

    return Experiment(
        name="evaluated_parameters",
        claim="The outer parameters are the best to evaluate (2.67), the replicas' average is close (2.68), one "
        "replica's own are worse (2.77).",
        source="Table 4",
        runs=labelled_runs(),
        panels=_evaluated_panels,
        finding=finding,
        with_accuracy=True,
        parameters=("replica", "average"),
    )


def _evaluated_panels(rows: Sequence[Row]) -> list[Panel]:
    names = [
        {
            "setting": f"M = {row.get('replicas', 2)}, {row.get('at', 'end')}",
            "evaluated": name,
            "eval_loss": row[column],
        }
        for row in finished(rows)
        for name, column in _COLUMNS.items()
        if column in row
    ]
    theirs = {"": [Point(name, loss, loss, loss) for name, loss in published.EVALUATED_PARAMETERS.items()]}
    return [
        Panel(title="here", x_label="evaluated parameters", curves=curves(names, "evaluated", "setting")),
        Panel(title="Table 4: 500M", x_label="evaluated parameters", curves=theirs, published=True),
        *_accuracies(chosen(rows, replicas=2, at="end")),
    ]


def _accuracies(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each task, and the paper's beside HellaSwag."""
    whose = {"": "outer_parameters", "_average": "replica_average", "_replica": "first_replica"}
    named = [
        {"evaluated": name, **{c.removesuffix(end): row[c] for c in row if c.endswith(f"_acc{end}")}}
        for row in finished(rows)
        for end, name in whose.items()
    ]
    theirs = [
        {"evaluated": name, "hellaswag_acc": accuracy}
        for name, accuracy in published.EVALUATED_PARAMETERS_HELLASWAG.items()
    ]
    return accuracy_panels(named, "evaluated", None, theirs, x_label="evaluated parameters")


@registered(order=10)
def slack(tier: Tier) -> Experiment:
    """Different overlap_steps on the two replicas (Figure 14)."""
    pairs = ((1, 1), (1, 2), (1, 5), (1, 10), (5, 5), (5, 10), (10, 10))

    def runs(seed: int) -> LabelledConfigs:
        for pair in pairs:
            overlap_steps = pair[0] if pair[0] == pair[1] else pair
            config = tier.run(seed=seed, overlap_steps=overlap_steps)
            yield {"tau_1": pair[0], "tau_2": pair[1]}, config

    def finding(rows: Sequence[Row]) -> Finding:
        one = {"tau_1": 1, "tau_2": 1}
        gaps = {tau: change(rows, {"tau_1": 1, "tau_2": tau}, one) for tau in (2, 5, 10)}
        listed = ", ".join(f"{gap} at τ = (1, {tau})" for tau, gap in gaps.items())
        return Finding(f"over τ = (1, 1): {listed}", gaps[5].at_most(0.01))

    return Experiment(
        name="slack",
        claim="Loss hardly changes when τ differs between the replicas by a few steps.",
        source="Figure 14",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="τ of the first", x_label="τ of the second", curves=curves(rows, "tau_2", "tau_1"))
        ],
        finding=finding,
    )
