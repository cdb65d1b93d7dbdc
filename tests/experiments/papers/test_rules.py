"""The experiments of outer rules and inner optimizers: all runs of a very small tier, by real processes."""

import itertools
from dataclasses import replace

import pytest
from tests.experiments.runner.machines import FakeMachine, be_job_of_short_samples, tiny_config

from diloco.experiments.papers import experiment
from diloco.experiments.papers.comparison import finished
from diloco.experiments.papers.experiment import Point
from diloco.experiments.papers.rules import _evaluated, _frontier
from diloco.experiments.papers.tiers import Comparisons, InnerGrid, RulesGrid, small
from diloco.experiments.runner.grid import adopt, run_grid
from diloco.experiments.runner.machines import LocalMachine
from diloco.training.config.config import EvaluationConfig
from diloco.training.config.recipes import recipe


def test_the_frontier_has_the_points_below_which_none_with_as_few_bytes_lies():
    bytes_and_losses = [(1, 5.0), (2, 6.0), (3, 4.0), (3, 4.5), (9, 3.0), (10, 3.5)]
    points = {str(each): [Point(*each, 0.0, 0.0)] for each in reversed(bytes_and_losses)}
    assert [point[:2] for point in _frontier(points)] == [(1, 5.0), (3, 4.0), (9, 3.0)]


@pytest.mark.parametrize("num_steps", [12, 13, 15])
def test_the_loss_is_known_after_three_quarters_of_a_run_whose_steps_four_may_not_divide(num_steps):
    config = replace(recipe("tiny"), num_tokens=num_steps * recipe("tiny").tokens_per_step)
    assert (num_steps - 1) // _evaluated(config).evaluation.every_steps == 3


OTHER_NUMBERS = ("rda_momentum", "delayed_nesterov")
"""Rules that differ from `rda` and `delayed_late` in numbers alone."""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize("name", ["few_outer_steps", "inner_optimizers"])
def test_every_rule_and_optimizer_trains_and_has_its_place_in_table_and_figure(
    name, small_corpus, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("diloco.experiments.runner.job._be_job", be_job_of_short_samples)
    from diloco.report.figures.drawing import draw_experiment

    tier = small()
    sizes = {"global_batch": 4, "num_tokens": 12 * 4 * recipe("tiny").sequence_length}
    base = tiny_config(small_corpus, tmp_path, **sizes, evaluation=EvaluationConfig(num_tokens=1024))
    grid = RulesGrid(
        base=base,
        replicas=(2,),
        sync_everies=(4,),
        outer_learning_rates={
            rule: rates[:1]
            for rule, rates in tier.comparisons.rules.outer_learning_rates.items()
            if rule not in OTHER_NUMBERS
        },
    )
    inner = InnerGrid(base=base, replicas=(1, 4), optimizers=("adamw", "muon"), rates=(1,))
    comparisons = Comparisons(rules=grid, many_outer_steps=grid, few_outer_steps=grid, inner_optimizers=inner)
    one = experiment(name, replace(tier, comparisons=comparisons, seeds=(0,)))
    *_, rows = run_grid(one.runs, tmp_path / "runs", LocalMachine(4))
    assert [row.get("failed") for row in rows] == [None] * len(one.runs)
    assert len(draw_experiment(one, rows).axes) == len(one.panels(rows)) == {"few_outer_steps": 3}.get(name, 1)
    assert "no run" not in one.finding(finished(rows)).measured.replace("rda: no run", "")
    adopt(rows, tmp_path / "elsewhere")
    assert next(run_grid(one.runs, tmp_path / "elsewhere", FakeMachine())) == rows, "from its table alone"
    if name == "few_outer_steps":
        losses = {row["rule"]: row["eval_loss"] for row in rows}
        same = [rules for rules in itertools.combinations(losses, 2) if losses[rules[0]] == losses[rules[1]]]
        assert same == [], "each rule trains another model"
        assert all({f"eval_loss_at_{percent}" for percent in (25, 50, 75)} <= row.keys() for row in rows)
        sent = {row["rule"]: row["bytes_sent_per_replica"] for row in rows}
        assert sent["sparseloco"] < sent["nesterov"] / 40
