"""The experiments of Streaming DiLoCo (arXiv 2501.18512)."""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from diloco.experiments.papers.comparison import (
    Change,
    Placed,
    Row,
    all_of,
    change,
    chosen,
    common,
    finished,
    flops,
    of_bands,
    placed,
)
from diloco.experiments.papers.experiment import (
    Experiment,
    Finding,
    Panel,
    Point,
    accuracy_panels,
    curves,
    over_seeds,
    wall_clock_panels,
)
from diloco.experiments.papers.tiers import BASELINE, DILOCO, STREAMING, Tier
from diloco.experiments.runner.grid import LabelledRun
from diloco.experiments.runner.rows import CURVE, EMBEDDING_CURVE, TENTHS
from diloco.paper_tables import rows as published_rows
from diloco.presets import Method
from diloco.scaling.gap_laws import diloco_gap, streaming_gap


def _published(table: str) -> list[Row]:
    """A paper's rows, with accuracies in columns like ours, as fractions."""
    tasks = ("hellaswag", "piqa", "arc_easy")
    return [
        {name: cell for name, cell in row.items() if name not in tasks}
        | {f"{task}_acc": row[task] / 100 for task in tasks}
        for row in published_rows(table)
    ]


LONG = "Streaming, H=100"
"""The variant whose slope the paper fits."""


def scaling(tier: Tier) -> Experiment:
    """Every method at every size, and Streaming DiLoCo with H = 100 and M = 4 (Figure 4, Tables 6 and 7)."""
    most_steps = tier.step_batches[-1]
    variants: dict[str, dict[str, Any]] = {
        LONG: {"sync_every": 100},
        "Streaming, M=4": {"num_replicas": 4},
        "Streaming, M=4, H=100": {"num_replicas": 4, "sync_every": 100},
    }

    def runs() -> Iterator[LabelledRun]:
        for size in tier.sizes:
            for batch in tier.step_batches:
                at: dict[str, Any] = {"size": size, "batch": batch}
                for method in (BASELINE, DILOCO, STREAMING):
                    yield LabelledRun({"method": method, **at}, tier.run(method, **at))
                if batch == most_steps:
                    for name, fields in variants.items():
                        yield LabelledRun({"method": name, **at}, tier.run(**at, **fields))

    def finding(rows: Sequence[Row]) -> Finding:
        compared = _at(rows, most_steps)
        gaps = _gaps(compared, tier)
        listed = "; ".join(
            f"M = {_GAP_LAWS[method][0]}, H = {_GAP_LAWS[method][1]} "
            + ", ".join(f"{gap} at {size}" for size, gap in of_one.items())
            for method, of_one in gaps.items()
        )
        verdict = of_bands(gap.verdict for of_one in gaps.values() for gap in of_one.values())
        slopes = {
            method: {seed: _slope(chosen(compared, method=method, seed=seed)) for seed in tier.seeds}
            for method in (BASELINE, LONG)
        }
        baseline, ours = (statistics.mean(by_seed.values()) for by_seed in slopes.values())
        measured = (
            f"Streaming over Data-Parallel: {listed}; slopes {baseline:.4f} (Data-Parallel) and {ours:.4f} "
            "(H = 100) nats per e-fold of operations"
        )
        steeper = Change(
            {
                seed: difference
                for seed in tier.seeds
                if not math.isnan(difference := slopes[BASELINE][seed] - slopes[LONG][seed])
            }
        )
        return Finding(measured, f"gaps: {verdict}; slopes: {steeper.rises()}")

    return Experiment(
        name="scaling",
        claim="The gap to Data-Parallel falls as models grow: a power law through the paper's sizes gives a band "
        "at ours. With H = 100 Streaming DiLoCo gains more from compute (slopes −0.1354 and −0.1315).",
        source="Figure 4, section 3.2.1, Tables 6 and 7",
        with_accuracy=True,
        runs=over_seeds(tier, runs()),
        panels=lambda rows: _scaling_panels(tier, rows),
        finding=finding,
    )


_GAP_LAWS = {
    STREAMING: (2, 30),
    LONG: (2, 100),
    "Streaming, M=4": (4, 30),
    "Streaming, M=4, H=100": (4, 100),
}
"""M and H of each method whose gap has a published law."""


def _gaps(rows: Sequence[Row], tier: Tier) -> dict[str, dict[str, Placed]]:
    """The gap to Data-Parallel beside its band, by method and size."""
    return {
        method: {
            size: placed(
                rows, {"method": method, "size": size}, {"method": BASELINE, "size": size}, streaming_gap(*setting)
            )
            for size in tier.sizes
        }
        for method, setting in _GAP_LAWS.items()
    }


def _gap_panel(rows: Sequence[Row], tier: Tier) -> Panel:
    """The gaps of M = 2 and 4 with H = 30, and the bands of their laws over the sizes of both."""
    gaps = _gaps(rows, tier)
    ours = {
        size: float(chosen(rows, size=size)[0]["num_params"]) for size in tier.sizes if chosen(rows, size=size)
    }
    over = sorted({*ours.values(), *(10.0**power for power in range(6, 10))})
    panel_curves: dict[str, list[Point]] = {}
    for method, (replicas, period) in _GAP_LAWS.items():
        if period != tier.sync_every:
            continue
        bands = (streaming_gap(replicas, period).band(n) for n in over)
        panel_curves[f"M = {replicas}, the paper's law"] = [
            Point(n, 100 * band.value, 100 * (band.low or 0), 100 * (band.high or 0))
            for n, band in zip(over, bands, strict=True)
        ]
        measured = {ours[size]: gap.gap for size, gap in gaps[method].items() if gap.gap.by_seed}
        panel_curves[f"M = {replicas}, here"] = [
            Point(n, 100 * gap.mean, 100 * min(gap.by_seed.values()), 100 * max(gap.by_seed.values()))
            for n, gap in measured.items()
        ]
    return Panel(
        title=f"gap to Data-Parallel, H = {tier.sync_every}",
        x_label="parameters",
        y_label="loss over Data-Parallel's, %",
        x_log=True,
        curves={name: points for name, points in panel_curves.items() if points},
    )


def _scaling_panels(tier: Tier, rows: Sequence[Row]) -> list[Panel]:
    published = _published("streaming_scaling")
    labels = {"x_label": "floating-point operations, 6·N·tokens", "x_log": True}
    return [
        *(
            Panel(title=_batch_title(tier, batch), curves=curves(_at(rows, batch), flops, "method"), **labels)
            for batch in tier.step_batches
        ),
        Panel(
            title="arXiv 2501.18512, Tables 6 and 7",
            curves=curves(published, "flops", "method"),
            published=True,
            **labels,
        ),
        _gap_panel(_at(rows, tier.step_batches[-1]), tier),
        *accuracy_panels(_at(rows, tier.step_batches[-1]), flops, "method", published, **labels),
    ]


def _at(rows: Sequence[Row], batch: float) -> list[Row]:
    return chosen(rows, batch=batch)


def _batch_title(tier: Tier, batch: float) -> str:
    return (
        f"here, {tier.run(batch=batch).tokens_per_step:,} tokens per step"
        if len(tier.step_batches) > 1
        else "here"
    )


def _slope(rows: Sequence[Row]) -> float:
    """The slope of the loss over the logarithm of the operations, by least squares."""
    if len({flops(row) for row in rows}) < 2:
        return math.nan
    return float(
        np.polyfit([math.log(flops(row)) for row in rows], [float(row["eval_loss"]) for row in rows], 1)[0]
    )


def overtraining(tier: Tier) -> Experiment:
    """Token budgets from the size's own up, for all methods (Tables 2 and 8; the laws' Figures 11 and 12)."""
    streaming: dict[str, dict[str, Any]] = {"Streaming, M=2": {}, "Streaming, M=4": {"num_replicas": 4}}
    diloco: dict[str, dict[str, Any]] = {
        f"DiLoCo, M={replicas}": {"num_replicas": replicas} for replicas in (1, 2, 4)
    }

    def runs() -> Iterator[LabelledRun]:
        for size, multiples in tier.multiples.items():
            for multiple in multiples:
                labels = {"size": size, "multiple": multiple}
                budget = {"size": size, "overtrained": True, "tokens": multiple}
                yield LabelledRun({"method": "Data-Parallel", **labels}, tier.run(BASELINE, **budget))
                two, own = (tier.run(**budget, num_replicas=m).global_batch for m in (2, 4))
                for name, fields in streaming.items():
                    # With M = 4 the batch is doubled in the paper's Table 8.
                    batch = 2 * two / own if fields else 1
                    yield LabelledRun({"method": name, **labels}, tier.run(**budget, **fields, batch=batch))
                for name, fields in diloco.items():
                    yield LabelledRun({"method": name, **labels}, tier.run(DILOCO, **budget, **fields))

    def finding(rows: Sequence[Row]) -> Finding:
        listed, bands, growth = [], [], []
        for method, size in itertools.product(("Streaming, M=2", "DiLoCo, M=1"), tier.multiples):
            law = diloco_gap(1) if method == "DiLoCo, M=1" else streaming_gap(2, _overtrained_period(tier, size))
            gaps = {
                n: placed(
                    chosen(rows, size=size, multiple=n), {"method": method}, {"method": "Data-Parallel"}, law
                )
                for n in tier.multiples[size]
            }
            least, most = min(gaps), max(gaps)
            bands.append(gaps[least].verdict)
            growth.append(gaps[most].gap.minus(gaps[least].gap).at_most(0.0))
            at = ", ".join(f"{gap if n == least else gap.gap} at {n}× of {size}" for n, gap in gaps.items())
            listed.append(f"{method} {at}")
        verdict = f"gaps at the least budget: {of_bands(bands)}; no growth with tokens: {all_of(*growth)}"
        return Finding(f"over Data-Parallel: {'; '.join(listed)}", verdict)

    return Experiment(
        name="overtraining",
        claim="The gap to Data-Parallel does not grow with the tokens per parameter. At the least budget it lies "
        "in the band of a power law through the papers' sizes.",
        source="Tables 2 and 8; arXiv 2503.09799, Figures 11 and 12",
        with_accuracy=True,
        runs=over_seeds(tier, runs()),
        panels=lambda rows: _overtraining_panels(tier, rows),
        finding=finding,
    )


def _overtraining_panels(tier: Tier, rows: Sequence[Row]) -> list[Panel]:
    published = [
        {
            **row,
            "method": f"Streaming, M={row['replicas']}" if "replicas" in row else "Data-Parallel",
            "num_tokens": row["tokens_billion"] * 1e9,
        }
        for row in _published("streaming_overtraining")
    ]
    labels = {"x_label": "tokens", "x_log": True}
    of_sizes = [row for row in rows if row.get("size") in tier.overtrained]  # not those of an earlier grid
    compared = [row for row in of_sizes if row["method"] in ("Data-Parallel", "DiLoCo, M=2")]
    first = next(iter(tier.multiples))
    return [
        *(
            Panel(title=f"here, {size}", curves=curves(chosen(rows, size=size), _tokens, "method"), **labels)
            for size in tier.multiples
        ),
        Panel(
            title="arXiv 2501.18512, Table 2: 1B, Dolma",
            curves=curves(published, _tokens, "method"),
            published=True,
            **labels,
        ),
        *wall_clock_panels(
            compared,
            lambda row: f"{row['method']}, {row.get('size')}",
            lambda row: 0 if row["method"] == "Data-Parallel" else 2,
            lambda row: _overtrained_period(tier, row["size"]),
        ),
        *accuracy_panels(chosen(rows, size=first), _tokens, "method", published, **labels),
    ]


def _overtrained_period(tier: Tier, size: str) -> int:
    """H of the runs with more tokens."""
    return tier.overtrained[size].diloco.sync_every


def _tokens(row: Row) -> float:
    return float(row["num_tokens"])


def overlap(tier: Tier) -> Experiment:
    """τ and α: the inner steps that an exchange overlaps, and the mixing at the merge (Figure 5)."""

    runs = (
        LabelledRun({"alpha": mixing, "tau": tau}, tier.run(overlap_steps=tau, mixing=mixing))
        for mixing in (0.0, 0.5)
        for tau in (1, 2, 5, 10, 20)
    )

    def finding(rows: Sequence[Row]) -> Finding:
        over = {
            (mixing, tau): change(rows, {"alpha": mixing, "tau": tau}, {"alpha": mixing, "tau": 1})
            for mixing, tau in ((0.5, 5), (0.5, 10), (0.5, 20), (0.0, 10), (0.0, 20))
        }
        listed = ", ".join(f"{gap} at τ = {tau}, α = {mixing:g}" for (mixing, tau), gap in over.items())
        return Finding(f"over τ = 1: {listed}", all_of(*(over[0.5, tau].at_most(0.002) for tau in (5, 10))))

    return Experiment(
        name="overlap",
        claim="Overlapping up to 10 inner steps costs less than 0.2 %.",
        source="Figure 5, section 3.3",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="α", x_label="τ, overlapped inner steps", curves=curves(rows, "tau", "alpha"))
        ],
        finding=finding,
    )


def compression(tier: Tier) -> Experiment:
    """Codecs of the outer gradients: their precision, and the share of the values they send (Figures 6 and 15)."""
    sparse, densities = ("topk", "feddropout", "dare"), (0.25, 0.5, 0.75)
    kept = {f"{wire}:density={density:g}": (wire, density) for wire in sparse for density in densities}
    wires = ("fp32", "bf16", "e4m3", "e3m0", "int2", *kept, "topk")
    kept["topk"] = "topk", 0.05

    def panels(rows: Sequence[Row]) -> list[Panel]:
        dropped = [row for row in rows if row.get("wire") in kept]
        by_density = curves(
            sorted(dropped, key=lambda row: kept[row["wire"]][1]),
            lambda row: kept[row["wire"]][1],
            lambda row: kept[row["wire"]][0],
        )
        return [
            Panel(title="", x_label="codec", curves=curves(rows, "wire")),
            Panel(title="codec", x_label="share of the values that is sent", curves=by_density),
            *accuracy_panels(rows, "wire", None, x_label="codec"),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        losses = {wire: change(rows, {"wire": wire}, {"wire": "fp32"}) for wire in wires[1:]}
        measured = f"over FP32: {'; '.join(f'{wire} {loss}' for wire, loss in losses.items())}"
        dropped = [losses[f"{wire}:density=0.25"].rises() for wire in sparse]
        fewer = [losses[f"{wire}:density=0.25"].rises_over(losses[f"{wire}:density=0.75"]) for wire in sparse]
        fewer.append(losses["topk"].rises_over(losses["topk:density=0.25"]))
        return Finding(measured, all_of(losses["e3m0"].at_most(0.005), *dropped, *fewer))

    return Experiment(
        name="compression",
        claim="4-bit floats (E3M0) cost no loss; dropping values does, and the more the fewer are kept.",
        source="Figures 6 and 15",
        with_accuracy=True,
        runs=over_seeds(tier, (LabelledRun({"wire": wire}, tier.run(wire=wire)) for wire in wires)),
        panels=panels,
        finding=finding,
    )


def fragment_size(tier: Tier) -> Experiment:
    """The blocks of a fragment: their number and their pattern (Figure 7)."""

    def runs() -> Iterator[LabelledRun]:
        for pattern in ("sequential", "strided"):
            for size in tier.layers_per_fragment:
                is_same = size == 1 or size >= tier.base_config.model.num_layers
                fragments = "strided" if is_same else pattern
                config = tier.run(fragments=fragments, layers_per_fragment=size)
                yield LabelledRun({"fragments": pattern, "layers": size}, config)

    def finding(rows: Sequence[Row]) -> Finding:
        first, *_, last = tier.layers_per_fragment
        sizes = change(rows, {"fragments": "strided", "layers": first}, {"fragments": "strided", "layers": last})
        patterns = {
            size: change(
                rows, {"fragments": "strided", "layers": size}, {"fragments": "sequential", "layers": size}
            )
            for size in tier.layers_per_fragment[1:-1]
        }
        listed = ", ".join(f"{gap} at {size} layers" for size, gap in patterns.items())
        verdict = all_of(sizes.within(0.01), *(gap.within(0.01) for gap in patterns.values()))
        return Finding(f"{first} over {last} layers: {sizes}; strided over sequential: {listed}", verdict)

    return Experiment(
        name="fragment_size",
        claim="The size of fragments matters little, and so does their pattern; strided is a little better.",
        source="Figure 7",
        runs=over_seeds(tier, runs()),
        panels=lambda rows: [
            Panel(title="", x_label="blocks in a fragment", curves=curves(rows, "layers", "fragments"))
        ],
        finding=finding,
    )


def freezing(tier: Tier) -> Experiment:
    """Training only the fragment that is sent next, as FedPart does (arXiv 2410.11559)."""

    runs = (LabelledRun({"frozen": name}, tier.run(freeze=name == "yes")) for name in ("no", "yes"))

    def panels(rows: Sequence[Row]) -> list[Panel]:
        theirs = curves(published_rows("streaming_freezing"), "frozen")
        return [
            Panel(title="here", x_label="others frozen", curves=curves(rows, "frozen")),
            Panel(title="arXiv 2501.18512", x_label="others frozen", curves=theirs, published=True),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        frozen = change(rows, {"frozen": "yes"}, {"frozen": "no"})
        return Finding(f"frozen over Streaming: {frozen}", frozen.rises(0.02))

    return Experiment(
        name="freezing",
        claim="Training only the fragment that is sent next is much worse: 3.2145 against 2.6749, +20 %.",
        source="section A.5",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
    )


_NAMES: dict[Method, str] = {DILOCO: "DiLoCo", STREAMING: "Streaming"}


def num_replicas(tier: Tier) -> Experiment:
    """One to eight replicas, at a constant global batch and at a constant local one (Figure 11)."""

    def runs() -> Iterator[LabelledRun]:
        for method in _NAMES:
            for constant in ("global", "local"):
                for replicas in (1, 2, 4, 8):
                    batch = 1 if constant == "global" else replicas / 2
                    config = tier.run(method, num_replicas=replicas, batch=batch)
                    yield LabelledRun({"method": method, "constant_batch": constant, "replicas": replicas}, config)

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
        beside = placed(
            chosen(rows, method=DILOCO, constant_batch="global"),
            {"replicas": 8},
            {"replicas": 2},
            diloco_gap(8, over=2),
        )
        measured = f"M = 8 over M = 2: {listed}; DiLoCo at a constant global batch: {beside.verdict}"
        return Finding(measured, all_of(*(gap.rises() for gap in gaps.values())))

    return Experiment(
        name="num_replicas",
        claim="At a fixed token budget loss rises with the number of replicas, with either batch held constant, "
        "for DiLoCo and Streaming alike.",
        source="Figure 11",
        runs=over_seeds(tier, runs()),
        panels=panels,
        finding=finding,
    )


def sync_every(tier: Tier) -> Experiment:
    """H, for DiLoCo and for Streaming DiLoCo, from 5 (Figure 12)."""

    runs = (
        LabelledRun({"method": method, "H": period}, tier.run(method, sync_every=period))
        for method in _NAMES
        for period in tier.sync_everies
    )

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
            Panel(title="", x_label="H, inner steps per round", x_log=True, curves=curves(rows, "H", "method"))
        ],
        finding=finding,
    )


_COLUMNS = {
    "outer_parameters": "eval_loss",
    "replica_average": "eval_loss_average",
    "first_replica": "eval_loss_replica",
}
"""The column of the loss of each set of parameters."""


_END_RATES = (0.05, 0.3, 1.0)
"""The learning rate at the end, as a part of its peak, which the paper does not state."""


def evaluated_parameters(tier: Tier) -> Experiment:
    """Losses of the outer parameters, a replica's own, and the average, at the end and halfway (Table 4)."""
    settings = [(*end, "end") for end in itertools.product((2, 4), (tier.sync_every, 100), _END_RATES)]
    settings += [(replicas, tier.sync_every, _END_RATES[0], "half") for replicas in (2, 4)]

    def runs() -> Iterator[LabelledRun]:
        for replicas, period, end_rate, at in settings:
            config = tier.run(num_replicas=replicas, sync_every=period)
            config = replace(config, optimizer=replace(config.optimizer, final_fraction=end_rate))
            at_step = config.num_steps // 2 if at == "half" else None
            if at_step is not None:
                config = replace(config, checkpoint=replace(config.checkpoint, every_steps=at_step))
            labels = {"replicas": replicas, "H": period, "end_rate": end_rate, "at": at}
            yield LabelledRun(labels, config, at_step)

    def finding(rows: Sequence[Row]) -> Finding:
        listed: list[str] = []
        verdicts: dict[str, list[str]] = {}
        for replicas, period, end_rate, at in settings:
            chosen_rows = chosen(rows, replicas=replicas, H=period, end_rate=end_rate, at=at)
            average, first = (_over_outer(chosen_rows, name) for name in ("replica_average", "first_replica"))
            moment = "halfway" if at == "half" else f"at the end with {end_rate:.0%} of the learning rate"
            name = f"H = {period}, {moment}"
            verdicts.setdefault(name, []).extend(gap.rises() for gap in (average, first))
            listed.append(f"M = {replicas}, {name}: average {average}, first replica {first}")
        verdict = "; ".join(f"{name}: {all_of(*of_one)}" for name, of_one in verdicts.items())
        return Finding(f"over the outer parameters: {'; '.join(listed)}", verdict)

    return Experiment(
        name="evaluated_parameters",
        claim="The outer parameters are the best to evaluate (2.67), the replicas' average is close (2.68), one "
        "replica's own are worse (2.77).",
        source="Table 4",
        with_accuracy=True,
        parameters=("replica", "average"),
        runs=over_seeds(tier, runs()),
        panels=_evaluated_panels,
        finding=finding,
    )


def _over_outer(rows: Sequence[Row], name: str) -> Change:
    """The loss of other parameters over that of the outer parameters."""
    column = _COLUMNS[name]
    return Change({row["seed"]: float(row[column]) / float(row["eval_loss"]) - 1 for row in rows if column in row})


def _evaluated_panels(rows: Sequence[Row]) -> list[Panel]:
    names = [
        {
            "setting": _evaluated_setting(row),
            "evaluated": name,
            "eval_loss": row[column],
        }
        for row in finished(rows)
        for name, column in _COLUMNS.items()
        if column in row
    ]
    theirs = curves(published_rows("streaming_evaluated_parameters"), "evaluated")
    return [
        Panel(title="here", x_label="evaluated parameters", curves=curves(names, "evaluated", "setting")),
        Panel(title="Table 4: 500M", x_label="evaluated parameters", curves=theirs, published=True),
        *_accuracies(chosen(rows, replicas=2, at="end", H=30, end_rate=_END_RATES[0])),
    ]


def _evaluated_setting(row: Row) -> str:
    return f"M = {row['replicas']}, H = {row['H']}, " + (
        f"rate to {row['end_rate']:.0%}" if row["at"] == "end" else "halfway"
    )


def _accuracies(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each task, and the paper's beside HellaSwag."""
    whose = {"": "outer_parameters", "_average": "replica_average", "_replica": "first_replica"}
    named = [
        {"evaluated": name, **{c.removesuffix(end): row[c] for c in row if c.endswith(f"_acc{end}")}}
        for row in finished(rows)
        for end, name in whose.items()
    ]
    theirs = published_rows("streaming_evaluated_parameters")
    return accuracy_panels(named, "evaluated", None, theirs, x_label="evaluated parameters")


def slack(tier: Tier) -> Experiment:
    """Different τ on the two replicas (Figure 14)."""
    runs = (
        LabelledRun({"tau_1": one, "tau_2": two}, tier.run(overlap_steps=one if one == two else (one, two)))
        for one, two in ((1, 1), (1, 2), (1, 5), (1, 10), (5, 5), (5, 10), (10, 10))
    )

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


_PUBLISHED, _NEAR = (0.1, 0.0, -0.1), 0.05
"""The paper's cosines in the first tenth of training, halfway and in the last, read from its figure."""


def outer_cosine(tier: Tier) -> Experiment:
    """The cosine between the replicas' outer gradients, over training and by block (Figures 18 and 19)."""

    runs = (
        LabelledRun({"size": size, "batch": batch}, tier.run(size=size, batch=batch))
        for batch in tier.step_batches
        for size in tier.sizes
    )

    def finding(rows: Sequence[Row]) -> Finding:
        curves_of_runs = {row["run"]: curve for row in finished(rows) if (curve := _curve(row))}
        if not curves_of_runs:
            return Finding("no run", "cannot tell")
        falls = [curve[0] > curve[-1] for curve in curves_of_runs.values()]
        smaller = list(_falls_with_size(rows, tier))
        first = [
            row["cosine_block_0"] == max(_of_blocks(row)) for row in finished(rows) if "cosine_block_0" in row
        ]
        # The values near the papers' as runs grow longer, and the papers' shortest has 7,000 steps.
        most_steps = max(row["num_steps"] for row in finished(rows))
        longest = [curves_of_runs[row["run"]] for row in chosen(rows, num_steps=most_steps)]
        begin, middle, end = ([curve[part] for curve in longest] for part in (0, 4, -1))
        near = [
            abs(cosine - value) <= _NEAR
            for value, part in zip(_PUBLISHED, (begin, middle, end), strict=True)
            for cosine in part
        ]
        measured = (
            f"without embeddings, in {most_steps} steps, {_range(begin)} in the first tenth of training, "
            f"{_range(middle)} halfway, {_range(end)} in the last, within {_NEAR} of the paper's in "
            f"{_count(near)}; it falls in {_count(falls)} runs, is lower in the larger of two neighbouring sizes "
            f"in {_count(smaller)} pairs, and highest in the first block in {_count(first)} runs"
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
        with_curves=True,
        runs=over_seeds(tier, runs),
        panels=lambda rows: _panels(tier, rows),
        finding=finding,
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
    """For neighbouring sizes at one seed and batch: True if the larger has the lower mean cosine."""
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


EXPERIMENTS = (
    scaling,
    overtraining,
    overlap,
    compression,
    fragment_size,
    freezing,
    num_replicas,
    sync_every,
    evaluated_parameters,
    slack,
    outer_cosine,
)
