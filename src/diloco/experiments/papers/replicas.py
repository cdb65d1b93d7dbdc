"""Experiments of Streaming DiLoCo (arXiv 2501.18512) on replicas: their number, their slack, their agreement."""

from collections.abc import Sequence

from diloco.experiments.papers import published
from diloco.experiments.papers.comparison import Change, Row, all_of, change, chosen, common, finished
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


@registered(order=7)
def num_replicas(tier: Tier) -> Experiment:
    """One to eight replicas, at a constant global batch and at a constant local one (Figure 11)."""

    def runs(seed: int) -> LabelledConfigs:
        for constant in ("global", "local"):
            for replicas in (1, 2, 4, 8):
                batch = 1 if constant == "global" else replicas / 2
                config = tier.run(num_replicas=replicas, seed=seed, batch=batch)
                yield {"constant_batch": constant, "replicas": replicas}, config

    def finding(rows: Sequence[Row]) -> Finding:
        gaps = [
            change(rows, {"constant_batch": kind, "replicas": 8}, {"constant_batch": kind, "replicas": 2})
            for kind in ("global", "local")
        ]
        measured = f"M = 8 over M = 2: {gaps[0]} at a constant global batch, {gaps[1]} at a constant local one"
        return Finding(measured, all_of(*(gap.rises() for gap in gaps)))

    return Experiment(
        name="num_replicas",
        claim="At a fixed token budget loss rises with the number of replicas, with either batch held constant.",
        source="Figure 11",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="constant batch", x_label="replicas", curves=curves(rows, "replicas", "constant_batch"))
        ],
        finding=finding,
    )


@registered(order=8)
def sync_every(tier: Tier) -> Experiment:
    """H, for DiLoCo and for Streaming DiLoCo (Figure 12)."""

    def runs(seed: int) -> LabelledConfigs:
        for method in (DILOCO, STREAMING):
            for period in tier.sync_everies:
                yield {"method": method, "H": period}, tier.run(method, seed=seed, sync_every=period)

    def finding(rows: Sequence[Row]) -> Finding:
        low, high = tier.sync_every, tier.sync_everies[-1]
        diloco, streaming = (
            change(rows, {"method": m, "H": high}, {"method": m, "H": low}) for m in (DILOCO, STREAMING)
        )
        beside = change(rows, {"method": STREAMING, "H": low}, {"method": DILOCO, "H": low})
        measured = (
            f"H = {high} over H = {low}: DiLoCo {diloco}, Streaming {streaming}; "
            f"Streaming over DiLoCo at H = {low}: {beside}"
        )
        return Finding(measured, all_of(diloco.rises(), streaming.rises(), beside.at_most(0.01)))

    return Experiment(
        name="sync_every",
        claim="Loss rises slowly with H beyond 30, for DiLoCo and Streaming alike.",
        source="Figure 12",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="", x_label="H, inner steps a round", x_log=True, curves=curves(rows, "H", "method"))
        ],
        finding=finding,
    )


@registered(order=9)
def evaluated_parameters(tier: Tier) -> Experiment:
    """Held-out loss of the outer parameters, one replica's own, and the replicas' average (Table 4)."""
    columns = {
        "outer_parameters": "eval_loss",
        "replica_average": "eval_loss_average",
        "first_replica": "eval_loss_replica",
    }

    def runs(seed: int) -> LabelledConfigs:
        yield {}, tier.run(seed=seed)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        points = [
            point._replace(x=name)
            for name, column in columns.items()
            for point in curves(rows, lambda _: "", y=column).get("", [])
        ]
        theirs = {"": [Point(name, loss, loss, loss) for name, loss in published.EVALUATED_PARAMETERS.items()]}
        return [
            Panel(title="here", x_label="evaluated parameters", curves={"": points}),
            Panel(title="Table 4: 500M", x_label="evaluated parameters", curves=theirs, published=True),
            *_accuracies(rows),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        relative = {
            name: {
                row["seed"]: float(row[column]) / float(row["eval_loss"]) - 1
                for row in finished(rows)
                if column in row
            }
            for name, column in columns.items()
        }
        listed = "; ".join(
            f"{name.replace('_', ' ')} {min(values.values()):+.2%} … {max(values.values()):+.2%}"
            for name, values in relative.items()
            if name != "outer_parameters" and values
        )
        others = (values for name, values in relative.items() if name != "outer_parameters")
        return Finding(f"over the outer parameters: {listed}", all_of(*(Change(v).rises() for v in others)))

    return Experiment(
        name="evaluated_parameters",
        claim="The outer parameters are the best to evaluate (2.67), the replicas' average is close (2.68), one "
        "replica's own are worse (2.77).",
        source="Table 4",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
        with_accuracy=True,
        parameters=("replica", "average"),
    )


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


@registered(order=11)
def outer_cosine(tier: Tier) -> Experiment:
    """The cosine between the replicas' outer gradients (Figures 18 and 19)."""

    def runs(seed: int) -> LabelledConfigs:
        for size in tier.sizes:
            yield {"size": size}, tier.run(size=size, seed=seed)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        parts = ("first", "middle", "last")
        over_training = {
            size: [
                point._replace(x=(index + 0.5) / len(parts))
                for index, part in enumerate(parts)
                for point in curves(chosen(rows, size=size), "size", y=f"cosine_{part}_third").get("", [])
            ]
            for size in tier.sizes
        }
        by_block = {
            size: [
                point._replace(x=block)
                for block in range(tier.sizes[size].model.num_layers)
                for point in curves(chosen(rows, size=size), "size", y=f"cosine_block_{block}").get("", [])
            ]
            for size in tier.sizes
        }
        label = "cosine between two replicas' outer gradients"
        return [
            Panel(title="over training", x_label="part of training", y_label=label, curves=over_training),
            Panel(title="by block", x_label="block", y_label=label, curves=by_block),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        first, last = (
            [float(row[f"cosine_{part}_third"]) for row in finished(rows)] for part in ("first", "last")
        )
        if not first:
            return Finding("no run", "cannot tell")
        measured = (
            f"mean cosine {min(first):.2f} … {max(first):.2f} in the first third of training, "
            f"{min(last):.2f} … {max(last):.2f} in the last"
        )
        return Finding(measured, common(cosine > _CORRELATED for cosine in first + last))

    return Experiment(
        name="outer_cosine",
        claim="Outer gradients of different replicas stay correlated through training, at every size.",
        source="Figures 18 and 19",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
    )


_CORRELATED = 0.1
"""A cosine far above that of random vectors of this many elements, 0.003."""
