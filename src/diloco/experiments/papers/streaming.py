"""Experiments of Streaming DiLoCo (arXiv 2501.18512) on its quality and its settings."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from diloco.experiments.papers import published
from diloco.experiments.papers.comparison import Change, Row, all_of, change, chosen, flops
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
from diloco.experiments.papers.tiers import BASELINE, DILOCO, OVERTRAINED, STREAMING, Tier


@registered(order=1)
def scaling(tier: Tier) -> Experiment:
    """Every method at every size (Figure 4, Table 6)."""

    def runs(seed: int) -> LabelledConfigs:
        for size in tier.sizes:
            for method in (BASELINE, DILOCO, STREAMING):
                yield {"method": method, "size": size}, tier.run(method, size=size, seed=seed)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        theirs = curves(published.SCALING, "flops", "method")
        labels = {"x_label": "floating-point operations, 6·N·tokens", "x_log": True}
        return [
            Panel(title="here", curves=curves(rows, flops, "method"), **labels),
            Panel(title="arXiv 2501.18512, Table 6, M = 2, H = 30", curves=theirs, published=True, **labels),
            *accuracy_panels(rows, flops, "method", published.SCALING, **labels),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        slopes = {
            method: {seed: _slope(chosen(rows, method=method, seed=seed)) for seed in tier.seeds}
            for method in (BASELINE, STREAMING)
        }
        gaps = {
            size: change(rows, {"method": STREAMING, "size": size}, {"method": BASELINE, "size": size})
            for size in tier.sizes
        }
        listed = ", ".join(f"{gap} at {size}" for size, gap in gaps.items())
        baseline, ours = (statistics.mean(by_seed.values()) for by_seed in slopes.values())
        measured = (
            f"Streaming over Data-Parallel: {listed}; slopes {baseline:.4f} (Data-Parallel) and {ours:.4f} "
            "(Streaming) nats per e-fold of operations"
        )
        steeper = Change(
            {
                seed: difference
                for seed in tier.seeds
                if not math.isnan(difference := slopes[BASELINE][seed] - slopes[STREAMING][seed])
            }
        )
        return Finding(measured, all_of(*(gap.at_most(0.01) for gap in gaps.values()), steeper.rises()))

    return Experiment(
        name="scaling",
        claim="From 35M to 4B parameters Streaming DiLoCo ends within 1 % of Data-Parallel's loss, and gains more "
        "from compute (slopes −0.1354 and −0.1315).",
        source="Figure 4, Table 6",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
        with_accuracy=True,
    )


def _slope(rows: Sequence[Row]) -> float:
    """The slope of the loss over the logarithm of the operations, by least squares."""
    if len({flops(row) for row in rows}) < 2:
        return math.nan
    return float(
        np.polyfit([math.log(flops(row)) for row in rows], [float(row["eval_loss"]) for row in rows], 1)[0]
    )


@registered(order=2)
def overtraining(tier: Tier) -> Experiment:
    """Token budgets beyond the model's own (Tables 2 and 8; Figure 11 of arXiv 2503.09799)."""

    def runs(seed: int) -> LabelledConfigs:
        for multiple in tier.multiples:
            budget = {"size": OVERTRAINED, "tokens": multiple, "seed": seed}
            yield {"method": "Data-Parallel", "multiple": multiple}, tier.run(BASELINE, **budget)
            for replicas in tier.overtrained_replicas:
                labels = {"method": f"Streaming, M={replicas}", "multiple": multiple}
                yield labels, tier.run(num_replicas=replicas, **budget)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        theirs = curves(published.OVERTRAINING, _tokens, "method")
        labels = {"x_label": "tokens", "x_log": True}
        return [
            Panel(title="here", curves=curves(rows, _tokens, "method"), **labels),
            Panel(title="arXiv 2501.18512, Table 2: 1B, Dolma", curves=theirs, published=True, **labels),
            *accuracy_panels(rows, _tokens, "method", published.OVERTRAINING, **labels),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        gaps = {
            n: change(
                rows,
                {"method": "Streaming, M=2", "multiple": n},
                {"method": "Data-Parallel", "multiple": n},
            )
            for n in tier.multiples
        }
        listed = ", ".join(f"{gap} at {multiple}×" for multiple, gap in gaps.items())
        verdict = all_of(*(gap.at_most(0.01) for gap in gaps.values()))
        return Finding(f"Streaming, M = 2, over Data-Parallel: {listed}", verdict)

    return Experiment(
        name="overtraining",
        claim="With two replicas Streaming DiLoCo stays within 1 % of Data-Parallel's loss at every token budget.",
        source="Tables 2 and 8; arXiv 2503.09799, Figure 11",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
        with_accuracy=True,
    )


def _tokens(row: Row) -> float:
    return float(row["num_tokens"])


@registered(order=3)
def overlap(tier: Tier) -> Experiment:
    """τ and α: the inner steps that an exchange overlaps, and the mixing at the merge (Figure 5)."""

    def runs(seed: int) -> LabelledConfigs:
        for mixing in (0.0, 0.5):
            for tau in (1, 2, 5, 10, 20):
                config = tier.run(seed=seed, overlap_steps=tau, mixing=mixing)
                yield {"alpha": mixing, "tau": tau}, config

    def panels(rows: Sequence[Row]) -> list[Panel]:
        return [Panel(title="α", x_label="τ, overlapped inner steps", curves=curves(rows, "tau", "alpha"))]

    def finding(rows: Sequence[Row]) -> Finding:
        one = {"alpha": 0.5, "tau": 1}
        five, twenty = (change(rows, {"alpha": 0.5, "tau": tau}, one) for tau in (5, 20))
        unmixed = change(rows, {"alpha": 0.0, "tau": 20}, {"alpha": 0.0, "tau": 1})
        measured = f"τ = 5 over τ = 1: {five}; τ = 20: {twenty}; τ = 20 at α = 0: {unmixed}"
        return Finding(measured, five.at_most(0.01))

    return Experiment(
        name="overlap",
        claim="Overlapping up to 5 inner steps costs next to nothing, under 1 %, with α = 0.5.",
        source="Figure 5",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
    )


@registered(order=4)
def compression(tier: Tier) -> Experiment:
    """Codecs of the outer gradients (Figures 6 and 15)."""
    sparse = ("topk", "feddropout", "dare")
    wires = ("fp32", "bf16", "e4m3", "e3m0", "int2", *(f"{wire}:density=0.25" for wire in sparse), "topk")

    def runs(seed: int) -> LabelledConfigs:
        for wire in wires:
            yield {"wire": wire}, tier.run(seed=seed, wire=wire)

    def finding(rows: Sequence[Row]) -> Finding:
        losses = {wire: change(rows, {"wire": wire}, {"wire": "fp32"}) for wire in wires[1:]}
        measured = f"over FP32: {'; '.join(f'{wire} {loss}' for wire, loss in losses.items())}"
        dropped = [losses[f"{wire}:density=0.25"].rises() for wire in sparse]
        fewer = losses["topk"].rises_over(losses["topk:density=0.25"])
        return Finding(measured, all_of(losses["e3m0"].at_most(0.005), *dropped, fewer))

    return Experiment(
        name="compression",
        claim="4-bit floats (E3M0) cost no loss; dropping values does, and the more the fewer are kept.",
        source="Figures 6 and 15",
        runs=over_seeds(tier, runs),
        panels=lambda rows: [Panel(title="", x_label="codec", curves=curves(rows, "wire"))],
        finding=finding,
    )


@registered(order=5)
def fragment_size(tier: Tier) -> Experiment:
    """The blocks of a fragment: their number and their pattern (Figure 7)."""

    def runs(seed: int) -> LabelledConfigs:
        for pattern in ("sequential", "strided"):
            for size in tier.layers_per_fragment:
                is_same = size == 1 or size >= tier.base_config.model.num_layers
                fragments = "strided" if is_same else pattern
                config = tier.run(seed=seed, fragments=fragments, layers_per_fragment=size)
                yield {"fragments": pattern, "layers": size}, config

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
        runs=over_seeds(tier, runs),
        panels=lambda rows: [
            Panel(title="", x_label="blocks in a fragment", curves=curves(rows, "layers", "fragments"))
        ],
        finding=finding,
    )


@registered(order=6)
def freezing(tier: Tier) -> Experiment:
    """Training only the fragment that is sent next, as FedPart does (arXiv 2410.21374)."""

    def runs(seed: int) -> LabelledConfigs:
        for freeze in (False, True):
            yield {"frozen": "yes" if freeze else "no"}, tier.run(seed=seed, freeze=freeze)

    def panels(rows: Sequence[Row]) -> list[Panel]:
        return [
            Panel(title="here", x_label="others frozen", curves=curves(rows, "frozen")),
            Panel(title="arXiv 2501.18512", x_label="others frozen", curves=published.FREEZING, published=True),
        ]

    def finding(rows: Sequence[Row]) -> Finding:
        frozen = change(rows, {"frozen": "yes"}, {"frozen": "no"})
        return Finding(f"frozen over Streaming: {frozen}", frozen.rises(0.02))

    return Experiment(
        name="freezing",
        claim="Training only the fragment that is sent next is much worse: 3.2145 against 2.6749, +20 %.",
        source="section on FedPart",
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
    )
