"""The rule that chooses η and μ by the number of outer steps."""

import csv
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean

import pytest
import torch
from tests.engine.cases import Case, inner_step
from tests.processes import run_replicas

import diloco
from diloco.auto import chosen, expected_excess, warning_of_frequent
from diloco.training.config.config import TrainConfig, from_json, to_json
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import with_method_values

SWEEP = Path(__file__).parents[2] / "docs/results/outer_auto.csv"


def cells() -> dict[tuple, dict[tuple[float, float], float]]:
    """The mean loss over the seeds by η and μ, in each cell of the sweep."""
    losses: dict[tuple, dict[tuple[float, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    with SWEEP.open() as lines:
        for row in csv.DictReader(lines):
            facts = (
                *(int(row[name]) for name in ("num_outer_steps", "num_replicas", "sync_every")),
                float(row["mixing"]),
            )
            losses[row["mode"], *facts][float(row["eta"]), float(row["mu"])].append(float(row["loss"]))
    return {cell: {point: mean(values) for point, values in points.items()} for cell, points in losses.items()}


def test_in_the_cells_of_the_sweep_the_chosen_values_end_near_the_best():
    """Auto's own run is a point of each cell; one cell of 41, with 100 outer steps, is 0.6 % above."""
    above = sorted(losses[chosen(*facts)] / min(losses.values()) - 1 for (_, *facts), losses in cells().items())
    assert len(above) == 41 and above[-2] < 0.003 and above[-1] < 0.006 and mean(above) < 0.0011


def test_settings_that_a_start_warns_of_ended_above_the_chosen_ones():
    above = []
    for (_, *facts), losses in cells().items():
        best = losses[chosen(*facts)]
        above += [loss / best - 1 for point, loss in losses.items() if expected_excess(*point, *facts) > 0.01]
    assert len(above) > 20 and min(above) > 0.001 and mean(above) > 0.02


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_more_outer_steps_take_more_gain_and_more_momentum_up_to_a_bound(alpha):
    for facts in ((1, 10), (2, 30), (8, 500)):
        values = [chosen(steps, *facts, alpha) for steps in (0, 1, 10, 17, 100, 1_000, 10_000)]
        gains = [lr / (1 - momentum) for lr, momentum in values]
        assert all(a <= b * 1.01 for a, b in pairwise(gains))
        assert [momentum for _, momentum in values] == sorted(momentum for _, momentum in values)
        assert values[0][1] == 0.0 and values[-1][1] == 0.778 and max(gains) < 4.01
        for value, steps in zip(values, (0, 1, 10, 17, 100, 1_000, 10_000), strict=True):
            diloco.Nesterov(lr=value[0], momentum=value[1])
            assert alpha == 0.9 or expected_excess(*value, steps, *facts, alpha) < 1e-4 or gains[-1] > 3.9


def trained(case: Case) -> list[tuple[str, diloco.Nesterov]]:
    """The outer hash and rule of a run that was resumed half-way, and of one that was given the chosen rule."""
    chosen_by = {"outer": "auto", "num_steps": case.T}
    model = case.model()
    engine = case.engine(model, **chosen_by)
    for t in range(1, case.T + 1):
        inner_step(model, engine.exchange.replica, t)
        engine.step()
        if t == case.T // 2:
            theta, state = model.state_dict(), engine.state_dict()
            model = case.model()
            engine = case.engine(model, **chosen_by)
            model.load_state_dict(theta)
            engine.load_state_dict(state)
    engine.finish()
    plain = case.model()
    other = case.engine(plain, outer=engine.settings.outer)
    for t in range(1, case.T + 1):
        inner_step(plain, other.exchange.replica, t)
        other.step()
    other.finish()
    return [(one.outer_hash(), one.settings.outer) for one in (engine, other)]


def test_replicas_choose_the_same_rule_and_again_when_they_resume():
    case = Case(P=2, T=34, H=4, tau=1)
    results = run_replicas(trained, 2, case)
    lr, momentum = chosen(34 // 4, 2, 4, case.alpha)
    assert results == [[results[0][0]] * 2] * 2 and results[0][0][1] == diloco.Nesterov(lr=lr, momentum=momentum)


def test_a_config_keeps_auto_and_is_resolved_by_its_length():
    asked = recipe("tiny")
    asked = replace(asked, diloco=replace(asked.diloco, outer="auto"))
    assert from_json(TrainConfig, to_json(asked)).diloco.outer == "auto"
    for factor in (1, 10):
        longer = with_method_values(replace(asked, num_tokens=factor * asked.num_tokens))
        lr, momentum = chosen(6 * factor, 2, 10, 0.5)
        assert longer.diloco.outer_rule == f"nesterov:lr={lr},momentum={momentum}"
        assert with_method_values(longer) == longer
        in_store = replace(asked, num_tokens=longer.num_tokens, rendezvous="store")
        assert with_method_values(in_store).diloco == longer.diloco, "by those who must join before the start"
    assert with_method_values(replace(asked, method="data_parallel")).diloco.outer == "auto"
    for merge in ("mix:alpha=0.25", "mix", "overwrite"):
        diloco = replace(asked.diloco, merge=merge, mixing=0.25 if merge == "mix" else None)
        lr, _ = chosen(6, 2, 10, 0.0 if merge == "overwrite" else 0.25)
        assert f"lr={lr}," in with_method_values(replace(asked, diloco=diloco)).diloco.outer


@pytest.mark.parametrize(
    ("sync_every", "rule", "mixing", "least"),
    [(2, None, 0.5, 4), (4, None, 0.5, 0), (15, None, 0.0, 16), (16, None, 0.0, 0), (1, "sgd:lr=1", 0.0, 0)],
)
def test_outer_steps_that_are_too_frequent_for_their_momentum_are_named(
    sync_every: int, rule: str | None, mixing: float, least: int, caplog, monkeypatch
) -> None:
    setting = {"fragments": "whole", "sync_every": sync_every, "outer": rule, "overlap_steps": 0}
    diloco.StreamingDiLoCo(torch.nn.Linear(2, 2), exchange=diloco.LoopbackExchange(), mixing=mixing, **setting)
    expected = f"sync_every={sync_every} inner steps are too frequent for lr=0.4"
    assert (expected in caplog.text and f"sync_every={least} or more" in caplog.text) == bool(least)
    assert bool(caplog.text) == bool(least)
    caplog.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")  # another process of the same replica, on its machine
    diloco.StreamingDiLoCo(torch.nn.Linear(2, 2), exchange=diloco.LoopbackExchange(), mixing=mixing, **setting)
    assert not caplog.text


@pytest.mark.parametrize("mixing", [0.0, 0.5, 0.9])
def test_nothing_that_is_chosen_is_too_frequent(mixing: float):
    for facts in product((1, 10, 100, 10_000), (1, 2, 8, 64, 512), (1, 2, 5, 30, 500)):
        assert warning_of_frequent(*chosen(*facts, mixing), facts[-1], mixing) is None, facts
