"""Every experiment, at both tiers, on rows that are made up: its runs, its panels and its finding."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.experiments.papers.made_up import made_up

from diloco.errors import UserError
from diloco.experiments.papers import EXPERIMENTS, experiment, rules, streaming
from diloco.experiments.papers.comparison import chosen
from diloco.experiments.papers.tiers import BASELINE, DILOCO, STREAMING, TIERS
from diloco.scaling.gap_laws import diloco_gap, streaming_gap
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import check
from diloco.training.config.resolve import resolve


@pytest.fixture(params=list(TIERS), scope="module")
def experiments(request):
    """All experiments of a tier, by name."""
    tier = TIERS[request.param]()
    return {name: experiment(name, tier) for name in EXPERIMENTS}


@pytest.mark.slow
def test_every_run_can_be_started(experiments, tmp_path):
    runs = [run for one in experiments.values() for run in one.runs]
    assert all("seed" in run.labels for run in runs)
    # The engine is asked once per model and method, for the run that has the fewest steps to send all fragments.
    shortest: dict[tuple, TrainConfig] = {}
    for config in (run.config for run in runs if run.config.seed == 0):
        vocab_size = 32_000 if config.data.tokenizer == "bpe:32000" else 257
        one = resolve(config, vocab_size=vocab_size, prepared=tmp_path)
        diloco = replace(one.diloco, outer_learning_rate=one.diloco.outer_learning_rate and 0.4)
        kind = one.model, one.method, one.num_replicas, diloco
        shortest[kind] = min(shortest.get(kind, one), one, key=lambda each: each.num_steps)
    for config in shortest.values():
        check(config)


def test_rows_are_drawn_and_judged(experiments):
    for name, one in experiments.items():
        assert one.name == name, "what its table is called by"
        rows = made_up(one)
        panels = one.panels(rows)
        assert any(not panel.published for panel in panels)
        assert all(points for panel in panels for points in panel.curves.values()), name
        measured, verdict = one.finding(rows)
        assert measured and "nan" not in measured and re.search("agrees|tell|band|can't be tested", verdict)
        if one.with_accuracy:
            ours = [panel.curves.values() for panel in panels if "piqa" in panel.title and not panel.published]
            assert ours and all(0.4 <= p.mean <= 0.5 for curves in ours for points in curves for p in points)
        # With half of the runs, of which some failed, there is still a figure.
        half = [row if number % 4 else {**row, "failed": "lost"} for number, row in enumerate(rows)]
        half = half[: len(rows) // 2]
        one.panels(half)
        one.finding(half)


def cost_of_period(row):
    """A loss that rises with H, less with one replica and in the larger model."""
    return 1e-3 * row["H"] * (1.0 if row["replicas"] > 1 and row["size"] == "0.10M" else 0.5)


SIZES = {"0.10M": 0, "0.15M": 1, "0.24M": 2}
WIRES = {"topk": 0.06, "e3m0": 0.001} | {f"{wire}:density=0.25": 0.02 for wire in ("topk", "feddropout", "dare")}
BEST_RATE = {1: 0.1, 5: 0.1, 10: 0.2, 30: 0.4, 100: 0.8}
LAWS = {STREAMING: (2, 30), streaming.LONG: (2, 100), "Streaming, M=4": (4, 30), "Streaming, M=4, H=100": (4, 100)}
"""M and H of the methods whose gap has a published law."""


def expected_gap(row):
    """The gap that the papers' rows give at the size of a run of `scaling`."""
    return streaming_gap(*LAWS[row["method"]]).band(row["num_params"]).value if row["method"] in LAWS else 0.0


def tuned_gap(row):
    """The gap of DiLoCo by the law of its M, at the best of a grid; elsewhere the loss is higher."""
    off = 0.01 * (row.get("outer_learning_rate", 0.4) != 0.4)
    return off + (diloco_gap(row["replicas"]).band(row["num_params"]).value if row["replicas"] else 0.0)


WORSE = {
    "holds": {"averaging": 0.1, "adamw": 0.1, "delayed_late": 0.005, "eager": 0.005, "in_flight": 0.1, "mix": 0.1},
    "fails": {"averaging": -0.1, "auto": 0.02, "delayed_late": 0.1, "eager": 0.1, "pulse": 0.1, "taylor": 0.1},
}
"""By how much a rule's loss is above Nesterov's."""
SPARSE = {"holds": -0.1, "fails": 0.1}


def of_rule(row, claims):
    """The effect of a rule, with which all claims hold, or fail: then the best η of RDA follows M."""
    best_rate = 0.7 if claims == "holds" else {2: 0.5, 4: 1.0}.get(row["replicas"])
    is_off = row["rule"] == "rda" and row["eta"] != best_rate
    return WORSE[claims].get(row["rule"], 0.0) + 0.01 * is_off + SPARSE[claims] * (row["rule"] == "sparseloco")


CLAIMED = [claim.name for claim in rules._CLAIMS]


MUON = {0: 0.02, 1: 0.03, 2: 0.025, 4: 0.03, 8: 0.035}
"""By how much Muon is better than AdamW, with M replicas."""


# By how much the loss of a run is larger, so that the claim holds, and so that it does not.
EFFECTS = {
    "scaling": (expected_gap, lambda r: 0.2 + 0.1 * SIZES[r["size"]] if r["method"] in LAWS else 0.0),
    "overtraining": (
        lambda r: {"Streaming, M=2": 0.02, "DiLoCo, M=1": 0.003}.get(r["method"], 0.0) / r["multiple"],
        lambda r: 0.1 * r["multiple"] * (r["method"] != "Data-Parallel"),
    ),
    "overlap": (lambda r: 0.0001 * r["tau"], lambda r: 0.001 * r["tau"]),
    "compression": (lambda r: WIRES.get(r["wire"], 0.0), lambda r: 0.01 * (r["wire"] == "e3m0")),
    "fragment_size": (lambda r: 0.001 * r["layers"], lambda r: 0.02 * r["layers"]),
    "freezing": (lambda r: 0.2 * (r["frozen"] == "yes"), lambda r: 0.001 * (r["frozen"] == "yes")),
    "num_replicas": (lambda r: 0.01 * r["replicas"], lambda r: 0.2 - 0.01 * r["replicas"]),
    "sync_every": (
        lambda r: 0.001 * r["H"] + (0.1 if r["H"] < 30 and r["method"] == DILOCO else 0.0),
        lambda r: 0.2 - 0.001 * r["H"],
    ),
    "evaluated_parameters": (lambda r: 0.0, lambda r: -0.1),
    "slack": (lambda r: 0.001 * r["tau_2"], lambda r: 0.01 * r["tau_2"]),
    "outer_cosine": (lambda r: 0.0, lambda r: -0.1),
    "sync_cadence": (
        lambda r: (r["outer_learning_rate"] - BEST_RATE[r["H"]]) ** 2 + cost_of_period(r),
        lambda r: (r["outer_learning_rate"] - 0.4) ** 2 - cost_of_period(r),
    ),
    "batch_size": (
        lambda r: r["batch_tokens"] * (2e-5 if r["method"] == "Data-Parallel" else 1e-5),
        lambda r: r["batch_tokens"] * (1e-5 if r["method"] == "Data-Parallel" else 2e-5),
    ),
    "single_replica": (
        lambda r: 0.003 * (r["method"] != BASELINE),
        lambda r: 0.02 * (r["method"] != BASELINE),
    ),
    "sweep": (tuned_gap, lambda r: 0.2 * (r["replicas"] > 0)),
    **dict.fromkeys(
        ("rules", "many_outer_steps", "few_outer_steps"),
        tuple(partial(of_rule, claims=claims) for claims in ("holds", "fails")),
    ),
    "inner_optimizers": (
        lambda r: -MUON[r["replicas"]] * (r["optimizer"] == "muon"),
        lambda r: 0.02 * (r["optimizer"] == "muon") * (r["replicas"] + 1),
    ),
    # A loss that jumps at the largest size is not predicted by the smaller ones.
    "extrapolation": (tuned_gap, lambda r: (r["replicas"] > 0) * (0.3 if r["size"] == "0.24M" else 0.05)),
}
# The verdicts that are no plain "agrees" and "disagrees".
VERDICTS = {
    **dict.fromkeys(
        ("rules", "many_outer_steps"),
        tuple("; ".join(f"{name}: {answer}" for name in CLAIMED) for answer in ("agrees", "disagrees")),
    ),
    # One value of M says nothing of another's best η.
    "few_outer_steps": tuple(
        "; ".join(f"{name}: {'cannot tell' if name == 'rda' else answer}" for name in CLAIMED)
        for answer in ("agrees", "disagrees")
    ),
    "inner_optimizers": tuple(
        f"lower at every M: {answer}; closer to Data-Parallel with M > 2: {answer}; "
        f"not above it with M = 1: {answer}"
        for answer in ("agrees", "disagrees")
    ),
    "scaling": ("gaps: within the band; slopes: agrees", "gaps: above the band; slopes: disagrees"),
    "overtraining": (
        "gaps at the least budget: within the band; no growth with tokens: agrees",
        "gaps at the least budget: above the band; no growth with tokens: disagrees",
    ),
    "sync_cadence": tuple(
        f"{answer}; a long H costs less with one replica: {answer}, and in a larger model: {answer}"
        for answer in ("agrees", "disagrees")
    ),
    "batch_size": 2
    * (
        "the claim begins at 83.7M parameters with M = 1, 26M parameters with M = 2: it can't be tested at this "
        "size",
    ),
    "single_replica": ("within the band", "above the band"),
    "sweep": ("within the band", "above the band"),
    "extrapolation": (
        "predicted: agrees; gaps: within the band",
        "predicted: disagrees; gaps: above the band",
    ),
    "evaluated_parameters": tuple(
        "; ".join(
            f"{name}: {answer}"
            for name in (
                *(
                    f"H = {period}, at the end with {rate} of the learning rate"
                    for period in (30, 100)
                    for rate in ("5%", "30%", "100%")
                ),
                "H = 30, halfway",
            )
        )
        for answer in ("agrees", "disagrees")
    ),
}


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_a_verdict_follows_the_losses(name):
    one = experiment(name, TIERS["small"]())
    for effect, verdict in zip(EFFECTS[name], VERDICTS.get(name, ("agrees", "disagrees")), strict=True):
        assert one.finding(made_up(one, lambda r, effect=effect: 1 + effect(r))).verdict == verdict
    holds, fails = EFFECTS[name]
    mixed = made_up(one, lambda r: 1 + (holds if r["seed"] else fails)(r))
    if name not in VERDICTS:
        assert one.finding(mixed).verdict == "cannot tell"
    lost = [{**row, "failed": "lost"} for row in mixed]
    assert "cannot tell" in one.finding(lost).verdict or name == "batch_size"


def test_the_page_of_results_has_every_experiment_once():
    page = Path(__file__).parents[3] / "docs" / "results" / "experiments.md"
    assert sorted(EXPERIMENTS) == sorted(re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE))


def test_an_unknown_name_is_refused_with_those_that_there_are():
    for name, hint in (("scale", r"did you mean scaling\?"), ("x", "choose from .*scaling")):
        with pytest.raises(UserError, match=f"'{name}' is not an experiment: {hint}"):
            experiment(name, TIERS["small"]())


def test_cosines_that_fall_far_from_the_papers_do_not_agree():
    one = experiment("outer_cosine", TIERS["small"]())
    rows = made_up(one)
    assert one.finding(rows).verdict == "agrees"
    far = [{name: v + 0.5 if name.startswith("cosine_at_") else v for name, v in row.items()} for row in rows]
    assert one.finding(far).verdict == "disagrees"
    most_steps = max(row["num_steps"] for row in rows)
    in_short_runs = [
        of_far if of_far["num_steps"] < most_steps else row for row, of_far in zip(rows, far, strict=True)
    ]
    assert one.finding(in_short_runs).verdict == "agrees", "the papers' runs are longer than ours"


def test_an_overtrained_run_is_timed_by_its_own_period(monkeypatch):
    periods = []
    monkeypatch.setattr(
        streaming, "wall_clock_panels", lambda rows, series, replicas, period: periods.append(period) or []
    )
    one = experiment("overtraining", TIERS["paper"]())
    one.panels(made_up(one))
    assert [periods[0]({"size": size}) for size in ("1B", "90M")] == [100, 30]


def test_a_verdict_is_on_all_sizes_of_a_tier():
    laws = TIERS["paper"]().of_laws
    assert laws is not None
    tier = replace(laws, seeds=(0, 1))  # of one seed no difference has a verdict
    cadence, batch = experiment("sync_cadence", tier), experiment("batch_size", tier)

    def cost(row):
        of_period = {1: 0.25}.get(row["replicas"], 0.5 if row["size"] == "550M" else 1.0)
        best_rate = (BEST_RATE | {300: 1.0})[row["H"]]
        return 1 + (row["outer_learning_rate"] - best_rate) ** 2 + 1e-3 * row["H"] * of_period

    assert cadence.finding(made_up(cadence, cost)).verdict.endswith("in a larger model: agrees")

    def fails_at_550m(row):
        is_baseline, fails = row["method"] == "Data-Parallel", row["size"] == "550M"
        return 1 + row["batch_tokens"] * (1e-7 if is_baseline == fails else 2e-7)

    rows = made_up(batch, fails_at_550m)
    assert batch.finding(rows).verdict == "disagrees"
    assert batch.finding(chosen(rows, size="90M")).verdict == "cannot tell", "of the others there is no run yet"


@pytest.mark.parametrize("name", ["sync_cadence", "outer_cosine"])
def test_missing_runs_leave_the_verdict_open(name):
    one = experiment(name, TIERS["small"]())
    rows = made_up(one, lambda r: 1 + EFFECTS[name][0](r))
    missing = {"size": "0.15M"} if name == "outer_cosine" else {"size": "0.24M"}
    kept = [row for row in rows if any(row[label] != value for label, value in missing.items())]
    assert (
        len(kept) < len(rows)
        and one.finding(rows).verdict == VERDICTS.get(name, ("agrees",))[0]
        and "cannot tell" in one.finding(kept).verdict
    )


def test_the_tokens_of_a_run_do_not_depend_on_its_batch():
    tier = TIERS["small"]()
    for grid in tier.batch_grids:
        runs = [tier.run(batch=batch, tokens=grid.tokens) for batch in grid.batches]
        tokens = [run.num_tokens for run in runs]
        assert max(tokens) - min(tokens) <= max(run.tokens_per_step for run in runs)
        assert min(tokens) > (grid.tokens - 0.01) * tier.run().num_tokens
    assert tier.run(tokens=8).num_tokens == 8 * tier.run().num_tokens


def test_a_larger_batch_has_a_larger_learning_rate():
    tier = TIERS["small"]()
    rates = [tier.run(batch=batch).optimizer.learning_rate for batch in (1, 4)]
    assert rates[1] == 2 * rates[0] == 2 * tier.base_config.optimizer.learning_rate
    assert tier.run(batch=4, rate=0.25).optimizer.learning_rate == rates[0] / 2


def test_overtrained_text_is_dolma_and_what_is_held_out_stays_c4():
    tier = TIERS["paper"]()
    for config in tier.overtrained.values():
        assert config.data.train == ("hf:allenai/dolma:v1_7",)
        assert config.data.held_out == tier.base_config.data.held_out == ("hf:allenai/c4:en:validation",)
    budgets = [tier.overtrained["1B"].num_tokens * multiple for multiple in tier.multiples["1B"]]
    assert [round(budget / 1e9) for budget in budgets] == [25, 100, 250], "of Table 2"
