"""Experiments of other papers: outer rules, merge rules and inner optimizers, each with its own paper's claim."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.experiments.papers.comparison import Change, Row, Verdict, all_of, at_best, change, chosen, finished
from diloco.experiments.papers.experiment import Experiment, Finding, Panel, Point, curves, over_seeds
from diloco.experiments.papers.tiers import BASELINE, DILOCO, RulesGrid, Tier
from diloco.experiments.runner.grid import LabelledRun
from diloco.experiments.runner.rows import LOSS
from diloco.training.config.config import TrainConfig

_RULES: dict[str, dict[str, Any]] = {
    "averaging": {"outer": "nesterov:momentum=0"},
    "nesterov": {"outer": "nesterov:momentum=0.9"},
    "auto": {"outer": "auto"},
    "rda": {"outer": "rda:momentum=0"},
    "rda_momentum": {"outer": "rda:momentum=0.9"},
    "delayed_nesterov": {"outer": "delayed_nesterov:momentum=0.9"},
    "sparseloco": {"outer": "nesterov:momentum=0", "wire": "sparseloco", "error_feedback": 0.95},
    "pulse": {"outer": "nesterov:momentum=0.9", "wire": "pulse:density=0.25", "error_feedback": 1.0},
    "adamw": {"outer": "torch.AdamW:weight_decay=0"},
}
"""The settings of each outer rule on DiLoCo (one fragment, FP32, τ = 0), but for η."""
_LATE: dict[str, dict[str, Any]] = {
    "mix": {"merge": "mix", "mixing": 0.5},
    "overwrite": {"merge": "overwrite"},
    "in_flight": {"merge": "taylor:strength=0"},
    "taylor": {"merge": "taylor"},
    "delayed_late": {"merge": "taylor:strength=0", "outer": "delayed_nesterov:momentum=0.9"},
    "eager": {"merge": "translate", "outer": "eager:momentum=0.9"},
}
"""The settings of what is for a large τ, here H/2: merge rules of Nesterov's, then outer rules."""


def rules(tier: Tier) -> Experiment:
    """Every outer rule and merge rule on one base, in as many steps as the papers' smallest runs have."""
    return _comparison("rules", tier, tier.comparisons.rules)


def many_outer_steps(tier: Tier) -> Experiment:
    """The same in 133 outer steps, with H = 30."""
    return _comparison("many_outer_steps", tier, tier.comparisons.many_outer_steps)


def few_outer_steps(tier: Tier) -> Experiment:
    """The same in 17 outer steps, of two replicas."""
    return _comparison("few_outer_steps", tier, tier.comparisons.few_outer_steps)


def _comparison(name: str, tier: Tier, grid: RulesGrid) -> Experiment:
    def finding(rows: Sequence[Row]) -> Finding:
        listed, verdicts = [], []
        for claim in _CLAIMS:
            gaps = claim.gaps(rows)
            listed.append(f"{claim.name}: {'; '.join(f'{at} {gap}' for at, gap in gaps.items()) or 'no run'}")
            verdict = all_of(*map(claim.verdict, gaps.values())) if gaps else "cannot tell"
            verdicts.append(f"{claim.name}: {verdict}")
        return Finding(" | ".join(listed), "; ".join(verdicts))

    return Experiment(
        name=name,
        claim=" ".join(f"{claim.name} ({claim.source}): {claim.sentence}." for claim in _CLAIMS),
        source="the paper of each rule",
        runs=over_seeds(tier, _runs(tier, grid)),
        panels=lambda rows: [panel for at in _cells(rows) for panel in _panels(rows, *at)],
        finding=finding,
    )


def _runs(tier: Tier, grid: RulesGrid) -> Iterator[LabelledRun]:
    labels = {"replicas": 0, "H": 0, "tau": 0, "rule": BASELINE, "eta": None}
    yield LabelledRun(labels, _evaluated(tier.run(BASELINE, base=grid.base)))
    for replicas, period in itertools.product(grid.replicas, grid.sync_everies):
        for name, rates in grid.outer_learning_rates.items():
            tau = period // 2 if name in _LATE else 0
            fields: dict[str, Any] = {"sync_every": period, "overlap_steps": tau, **(_LATE | _RULES)[name]}
            for rate in rates:
                labels = {"replicas": replicas, "H": period, "tau": tau, "rule": name, "eta": rate}
                config = tier.run(
                    DILOCO, base=grid.base, num_replicas=replicas, outer_learning_rate=rate, **fields
                )
                yield LabelledRun(labels, _evaluated(config))


def _evaluated(config: TrainConfig) -> TrainConfig:
    """The config with its held-out loss after each quarter of training but the last."""
    return replace(config, evaluation=replace(config.evaluation, every_steps=math.ceil(config.num_steps / 4)))


Cell = tuple[int, int]
"""M and H."""


def _cells(rows: Sequence[Row]) -> list[Cell]:
    return list(dict.fromkeys((row["replicas"], row["H"]) for row in finished(rows) if row["replicas"]))


def _at(rows: Sequence[Row], replicas: int, period: int) -> list[Row]:
    """The rows of a cell, each rule's at its best η."""
    return at_best(chosen(rows, replicas=replicas, H=period), "eta", "rule")


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """A rule's claim in its own paper."""

    name: str
    """The rule, and what is claimed."""
    source: str
    sentence: str
    gaps: Callable[[Sequence[Row]], Mapping[str, Change]]
    """The measurement in each cell, by the cell's name."""
    verdict: Callable[[Change], Verdict]


def _over(rule: str, *others: str) -> Callable[[Sequence[Row]], Mapping[str, Change]]:
    """The loss of a rule over that of the best of others, in each cell that has both."""

    def gaps(rows: Sequence[Row]) -> dict[str, Change]:
        measured: dict[str, Change] = {}
        for replicas, period in _cells(rows):
            best = _at(rows, replicas, period)
            over = [change(best, {"rule": rule}, {"rule": other}) for other in others]
            if over := [gap for gap in over if gap.by_seed]:
                measured[f"M = {replicas}, H = {period}"] = max(over, key=lambda gap: gap.mean)
        return measured

    return gaps


def _carried(rule: str) -> Callable[[Sequence[Row]], Mapping[str, Change]]:
    """The loss of a rule with most replicas at the η that is best with the fewest, over that at its best η."""

    def gaps(rows: Sequence[Row]) -> dict[str, Change]:
        measured: dict[str, Change] = {}
        for period in dict.fromkeys(period for _, period in _cells(rows)):
            of_period = chosen(rows, H=period, rule=rule)
            present = {row["replicas"]: row["eta"] for row in at_best(of_period, "eta", "replicas")}
            if len(present) > 1:
                most = chosen(rows, replicas=max(present), H=period, rule=rule)
                one, other = ({"eta": present[m]} for m in (min(present), max(present)))
                measured[f"H = {period}, M = {max(present)}"] = change(most, one, other)
        return measured

    return gaps


_CLAIMS = (
    _Claim(
        name="nesterov",
        source="arXiv 2311.08105",
        sentence="Nesterov's momentum is the best outer rule, before averaging and Adam",
        gaps=_over("nesterov", "averaging", "adamw"),
        verdict=Change.falls,
    ),
    _Claim(
        name="auto",
        source="this package",
        sentence="at most 0.3 % above the best of the grid of η with momentum 0.9, and of averaging",
        gaps=_over("auto", "nesterov", "averaging"),
        verdict=lambda gap: gap.at_most(0.003),
    ),
    _Claim(
        name="rda",
        source="arXiv 2604.21428",
        sentence="η that is tuned for few replicas suits many: here it costs 0.3 % or less",
        gaps=_carried("rda"),
        verdict=lambda gap: gap.at_most(0.003),
    ),
    _Claim(
        name="delayed_nesterov",
        source="arXiv 2401.09135",
        sentence="on late outer gradients it is as good as the synchronous method: here within 1 %",
        gaps=_over("delayed_late", "nesterov"),
        verdict=lambda gap: gap.at_most(0.01),
    ),
    _Claim(
        name="eager_below_late",
        source="arXiv 2502.12996",
        sentence="its own part at once is better than the whole outer step late",
        gaps=_over("eager", "in_flight"),
        verdict=Change.falls,
    ),
    _Claim(
        name="eager_near_diloco",
        source="arXiv 2502.12996",
        sentence="with it a large τ costs little: here 1 % or less",
        gaps=_over("eager", "nesterov"),
        verdict=lambda gap: gap.at_most(0.01),
    ),
    _Claim(
        name="sparseloco",
        source="arXiv 2508.15706",
        sentence="at 1 to 3 % of the values and 2 bits it is better than DiLoCo in FP32",
        gaps=_over("sparseloco", "nesterov"),
        verdict=Change.falls,
    ),
    _Claim(
        name="pulse",
        source="arXiv 2602.03839, on post-training",
        sentence="it matches DiLoCo: here within 1 %",
        gaps=_over("pulse", "nesterov"),
        verdict=lambda gap: gap.at_most(0.01),
    ),
    _Claim(
        name="taylor",
        source="arXiv 2504.17672",
        sentence="with a large τ it is better than to mix",
        gaps=_over("taylor", "mix"),
        verdict=Change.falls,
    ),
)


def _panels(rows: Sequence[Row], replicas: int, period: int) -> Iterator[Panel]:
    cell = f"M = {replicas}, H = {period}"
    best = _at(rows, replicas, period)
    every_step = max((float(row["data_parallel_bytes_per_replica"]) for row in best), default=0.0)
    baseline = [{**row, "bytes_sent_per_replica": every_step} for row in chosen(rows, rule=BASELINE)]
    prompt = [row for row in [*baseline, *best] if not row["tau"]]
    points = curves(prompt, "bytes_sent_per_replica", "rule")
    yield Panel(
        title=f"{cell}: the frontier",
        x_label="bytes sent per replica",
        x_log=True,
        curves={"frontier": _frontier(points), **points},
    )
    yield Panel(title=f"{cell}: over steps", x_label="steps", curves=_over_steps(prompt))
    if late := [row for row in best if row["tau"]]:
        yield Panel(title=f"{cell}, τ = {late[0]['tau']}", x_label="rule", curves=curves(late, "rule"))


def _frontier(points: Mapping[str, Sequence[Point]]) -> list[Point]:
    """The points below which none with as few bytes lies."""
    by_bytes = sorted((point for each in points.values() for point in each), key=lambda point: point[:2])
    lowest = itertools.accumulate((point.mean for point in by_bytes), min)
    return [point for point, mean in zip(by_bytes, lowest, strict=True) if point.mean == mean]


def _over_steps(rows: Sequence[Row]) -> dict[str, list[Point]]:
    parts = dict.fromkeys(name for row in rows for name in row if name.startswith(LOSS))
    at = {name: int(name.removeprefix(LOSS)) / 100 for name in parts} | {"eval_loss": 1.0}
    panel_curves: dict[str, list[Point]] = {}
    for name, part in at.items():
        for label, points in curves(rows, lambda row, part=part: part * row["num_steps"], "rule", y=name).items():
            panel_curves.setdefault(label, []).extend(points)
    return panel_curves


def inner_optimizers(tier: Tier) -> Experiment:
    """DiLoCo and Data-Parallel with AdamW and with Muon inside, by the number of replicas (MuLoCo)."""
    grid = tier.comparisons.inner_optimizers

    def runs() -> Iterator[LabelledRun]:
        for optimizer, replicas, rate in itertools.product(grid.optimizers, (0, *grid.replicas), grid.rates):
            method = DILOCO if replicas else BASELINE
            config = tier.run(method, base=grid.base, num_replicas=replicas or 1, rate=rate)
            config = replace(config, optimizer=replace(config.optimizer, name=optimizer))
            labels = {"method": method, "optimizer": optimizer, "replicas": replicas, "rate": rate}
            yield LabelledRun(labels, config)

    def finding(rows: Sequence[Row]) -> Finding:
        best = _tuned(rows)
        lower = {m: _muon_over_adamw(best, m) for m in grid.replicas}
        own = {(name, m): _over_baseline(best, name, m) for name in ("adamw", "muon") for m in grid.replicas}
        listed = "; ".join(f"M = {m} {gap}" for m, gap in lower.items())
        beside = "; ".join(f"{name}, M = {m} {gap}" for (name, m), gap in own.items())
        closer = [own["adamw", m].rises_over(own["muon", m]) for m in grid.replicas if m > 2]
        verdict = (
            f"lower at every M: {all_of(*(gap.falls() for gap in lower.values()))}; closer to Data-Parallel with "
            f"M > 2: {all_of(*closer)}; not above it with M = 1: {own['muon', 1].at_most(0.0)}"
        )
        return Finding(f"Muon over AdamW inside: {listed}; over Data-Parallel of the same: {beside}", verdict)

    return Experiment(
        name="inner_optimizers",
        claim="Muon inside DiLoCo (MuLoCo) ends lower than AdamW with any number of replicas, loses less to "
        "Data-Parallel of its own with more than two, and nothing with one.",
        source="arXiv 2505.23725",
        runs=over_seeds(tier, runs()),
        panels=lambda rows: [
            Panel(
                title="inner optimizer, each at its best rate; 0: Data-Parallel",
                x_label="replicas",
                curves=curves(_tuned(rows), "replicas", "optimizer"),
            )
        ],
        finding=finding,
    )


def _tuned(rows: Sequence[Row]) -> list[Row]:
    return at_best(rows, "rate", "optimizer", "replicas")


def _muon_over_adamw(rows: Sequence[Row], replicas: int) -> Change:
    return change(chosen(rows, replicas=replicas), {"optimizer": "muon"}, {"optimizer": "adamw"})


def _over_baseline(rows: Sequence[Row], optimizer: str, replicas: int) -> Change:
    return change(chosen(rows, optimizer=optimizer), {"replicas": replicas}, {"replicas": 0})


EXPERIMENTS = (rules, many_outer_steps, few_outer_steps, inner_optimizers)
