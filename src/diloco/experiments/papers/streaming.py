"""Experiments of Streaming DiLoCo (arXiv 2501.18512) on its settings: overlap, codec, fragments."""

from collections.abc import Sequence

from diloco.experiments.papers import published
from diloco.experiments.papers.comparison import Row, all_of, change
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
from diloco.experiments.papers.tiers import Tier


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
    """Codecs of the outer gradients: their precision, and the share of the values they send (Figures 6 and 15)."""
    sparse, densities = ("topk", "feddropout", "dare"), (0.25, 0.5, 0.75)
    kept = {f"{wire}:density={density:g}": (wire, density) for wire in sparse for density in densities}
    wires = ("fp32", "bf16", "e4m3", "e3m0", "int2", *kept, "topk")
    kept["topk"] = "topk", 0.05

    def runs(seed: int) -> LabelledConfigs:
        for wire in wires:
            yield {"wire": wire}, tier.run(seed=seed, wire=wire)

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
        runs=over_seeds(tier, runs),
        panels=panels,
        finding=finding,
        with_accuracy=True,
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
