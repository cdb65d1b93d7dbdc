"""Every experiment, at both tiers, on rows that are made up: what is run, drawn and said."""

from dataclasses import replace

import pytest

from diloco.cli import main
from diloco.data.tokenizers import ByteTokenizer
from diloco.experiments.experiment import Change, change, curves
from diloco.experiments.grid import make_job
from diloco.experiments.recipes import EXPERIMENTS, experiment
from diloco.experiments.tiers import TIERS
from diloco.models.ladder import num_matrix_params
from diloco.training.config import resolve
from diloco.training.state import check


@pytest.fixture(params=list(TIERS))
def tier(request):
    return TIERS[request.param]()


def made_up(one) -> list[dict]:
    """A row a run, whose losses fall with tokens and parameters, and differ a little."""
    rows = []
    for number, run in enumerate(one.runs):
        config = run.config
        params = num_matrix_params(replace(config.model, vocab_size=config.model.vocab_size or 257))
        loss = 3.0 * (params * config.num_tokens) ** -0.02 + 0.001 * (number % 3)
        row = {**run.labels, "run": str(number), "eval_loss": loss, "num_params": params}
        row |= {"num_tokens": config.num_tokens, "eval_loss_replica": loss + 0.1, "eval_loss_average": loss + 0.01}
        row |= {f"cosine_{part}_third": 0.5 for part in ("first", "middle", "last")}
        row |= {f"cosine_block_{block}": 0.4 for block in range(config.model.num_layers)}
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_run_can_be_started(name, tier, tmp_path):
    for run in experiment(name, tier).runs:
        config = resolve(run.config, vocab_size=32_000 if tier.base == "500M" else 257, prepared=tmp_path)
        check(config)
        assert set(run.labels) >= {"seed"}


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_rows_are_drawn_and_judged(name, tier):
    one = experiment(name, tier)
    rows = made_up(one)
    panels = one.panels(rows)
    assert any(not panel.published for panel in panels)
    assert all(points for panel in panels for points in panel.curves.values()), name
    measured, verdict = one.finding(rows)
    assert measured and "nan" not in measured and verdict in ("agrees", "disagrees", "cannot tell")
    # With half of the runs, of which some failed, there is still a picture.
    half = [row if number % 4 else {**row, "failed": "lost"} for number, row in enumerate(rows[: len(rows) // 2])]
    one.panels(half)
    one.finding(half)


def test_the_small_tier_is_small():
    tier = TIERS["small"]()
    params = [
        num_matrix_params(replace(c.model, vocab_size=ByteTokenizer.vocab_size)) for c in tier.sizes.values()
    ]
    assert params == sorted(params) and params[0] > 1e5 and params[-1] < 5e5
    jobs = {
        make_job(run.config, tier.base_config.runs, ()).directory
        for name in EXPERIMENTS
        for run in experiment(name, tier).runs
    }
    assert len(jobs) < sum(len(experiment(name, tier).runs) for name in EXPERIMENTS)


def test_the_tokens_of_a_run_do_not_depend_on_its_batch():
    tier = TIERS["small"]()
    tokens = [tier.run(batch=batch).num_tokens for batch in tier.batches]
    most = max(tier.run(batch=batch).tokens_per_step for batch in tier.batches)
    assert max(tokens) - min(tokens) <= most
    assert tier.run(tokens=8).num_tokens == 8 * tier.run().num_tokens


def test_seeds_are_compared_with_themselves():
    rows = [
        {"method": method, "seed": seed, "eval_loss": loss}
        for method, losses in {"a": (1.0, 2.0), "b": (1.1, 2.2)}.items()
        for seed, loss in enumerate(losses)
    ]
    found = change(rows, {"method": "b"}, {"method": "a"})
    assert found.by_seed == pytest.approx((0.1, 0.1))
    assert (found.within(0.11), found.within(0.09), found.rises()) == ("agrees", "disagrees", "agrees")
    assert Change((0.1, -0.1)).rises() == "cannot tell" and str(Change(())) == "no run"
    (points,) = curves([row | {"x": 1} for row in rows if row["method"] == "a"], "x").values()
    assert points == [(1, 1.5, 1.0, 2.0)]


def test_the_commands_of_a_cluster_are_those_of_the_runs(capsys, tmp_path):
    main(["experiment", "freezing", "--tier", "paper", "--commands", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# freezing: {'frozen': 'no', 'seed': 0}"
    assert lines[1].startswith("torchrun --nproc-per-node 2 -m diloco train 550m ")
    assert lines[3].split().count("--diloco.freeze") == 1 and "hf:allenai/c4:en:train" in lines[3]
