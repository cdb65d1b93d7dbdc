"""Every experiment, at both tiers, on rows that are made up: what is run, drawn and said."""

import json
from dataclasses import replace

import pytest

from diloco.cli.main import main
from diloco.data.tokenizers import ByteTokenizer
from diloco.experiments.papers.experiment import Change, change, curves
from diloco.experiments.papers.recipes import EXPERIMENTS, experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.grid import make_job
from diloco.training.resolve import resolve
from diloco.training.streaming import check


@pytest.fixture(params=list(TIERS))
def tier(request):
    return TIERS[request.param]()


def made_up(one, effect=lambda row: 1.0) -> list[dict]:
    """A row a run, whose losses fall with tokens and parameters, differ with the seed, and have an effect."""
    rows = []
    for number, run in enumerate(one.runs):
        config = run.config
        params = replace(config.model, vocab_size=config.model.vocab_size or 257).num_matrix_params
        loss = 30.0 * (params * config.num_tokens) ** -0.1 * (1 + 0.01 * run.labels["seed"]) * effect(run.labels)
        row = {**run.labels, "run": str(number), "eval_loss": loss, "num_params": params}
        row |= {"num_tokens": config.num_tokens}
        sign = 1 if effect(row) >= 1 else -1
        row |= {"eval_loss_replica": loss + 0.1 * sign, "eval_loss_average": loss + 0.01 * sign}
        row |= {f"cosine_{part}_third": 0.5 * sign for part in ("first", "middle", "last")}
        row |= {f"cosine_block_{block}": 0.4 for block in range(config.model.num_layers)}
        row |= {"piqa_val_acc": 0.5, "piqa_val_acc_replica": 0.4, "piqa_val_acc_average": 0.45}
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
    if one.with_accuracy:
        accuracies = [panel for panel in panels if "piqa" in panel.title and not panel.published]
        assert accuracies and all(
            0.4 <= p.mean <= 0.5 for panel in accuracies for c in panel.curves.values() for p in c
        )
    # With half of the runs, of which some failed, there is still a picture.
    half = [row if number % 4 else {**row, "failed": "lost"} for number, row in enumerate(rows[: len(rows) // 2])]
    one.panels(half)
    one.finding(half)


SIZES = {"0.10M": 0, "0.15M": 1, "0.24M": 2}
WIRES = {"topk": 0.06, "e3m0": 0.001} | {f"{wire}:density=0.25": 0.02 for wire in ("topk", "feddropout", "dare")}
BEST_RATE = {5: 0.4, 30: 0.6, 100: 0.8}
# What makes the loss of a run larger, so that the claim holds, and so that it doesn't.
EFFECTS = {
    "scaling": (
        lambda r: 0.009 - 0.003 * SIZES[r["size"]] if r["method"] == "streaming" else 0.0,
        lambda r: 0.02 if r["method"] == "streaming" else 0.0,
    ),
    "overtraining": (
        lambda r: 0.005 * (r["method"] != "Data-Parallel"),
        lambda r: 0.02 * (r["method"] != "Data-Parallel"),
    ),
    "overlap": (lambda r: 0.001 * r["tau"], lambda r: 0.01 * r["tau"]),
    "compression": (lambda r: WIRES.get(r["wire"], 0.0), lambda r: 0.01 * (r["wire"] == "e3m0")),
    "fragment_size": (lambda r: 0.001 * r["layers"], lambda r: 0.02 * r["layers"]),
    "freezing": (lambda r: 0.2 * (r["frozen"] == "yes"), lambda r: 0.001 * (r["frozen"] == "yes")),
    "num_replicas": (lambda r: 0.01 * r["replicas"], lambda r: 0.2 - 0.01 * r["replicas"]),
    "sync_every": (lambda r: 0.001 * r["H"], lambda r: 0.2 - 0.001 * r["H"]),
    "evaluated_parameters": (lambda r: 0.0, lambda r: -0.1),
    "slack": (lambda r: 0.001 * r["tau_2"], lambda r: 0.01 * r["tau_2"]),
    "outer_cosine": (lambda r: 0.0, lambda r: -0.1),
    "sync_cadence": (
        lambda r: (r["outer_learning_rate"] - BEST_RATE[r["H"]]) ** 2,
        lambda r: (r["outer_learning_rate"] - 0.6) ** 2,
    ),
    "batch_size": (
        lambda r: r["batch_tokens"] * (2e-5 if r["method"] == "Data-Parallel" else 1e-5),
        lambda r: r["batch_tokens"] * (1e-5 if r["method"] == "Data-Parallel" else 2e-5),
    ),
    "single_replica": (
        lambda r: 0.02 * (r["method"] == "data_parallel"),
        lambda r: 0.02 * (r["method"] != "data_parallel"),
    ),
}


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_a_verdict_follows_the_losses(name):
    one = experiment(name, TIERS["small"]())
    holds, fails = EFFECTS[name]
    assert one.finding(made_up(one, lambda r: 1 + holds(r))).verdict == "agrees"
    assert one.finding(made_up(one, lambda r: 1 + fails(r))).verdict == "disagrees"
    mixed = made_up(one, lambda r: 1 + (holds if r["seed"] else fails)(r))
    assert one.finding(mixed).verdict == "cannot tell"
    assert one.finding([{**row, "failed": "lost"} for row in mixed]).verdict == "cannot tell"


def test_the_small_tier_is_small():
    tier = TIERS["small"]()
    params = [replace(c.model, vocab_size=ByteTokenizer.vocab_size).num_matrix_params for c in tier.sizes.values()]
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
    assert found.by_seed == pytest.approx({0: 0.1, 1: 0.1})
    assert (found.within(0.11), found.within(0.09), found.rises()) == ("agrees", "disagrees", "agrees")
    assert (found.rises(0.2), Change({0: 0.3, 1: 0.05}).rises()) == ("disagrees", "cannot tell")
    steeper = Change({0: 0.3, 1: 0.2})
    assert steeper.rises_over(found) == "agrees" and found.rises_over(found) == "cannot tell"
    assert steeper.rises_over(Change({0: 0.4, 1: 0.29})) == "disagrees"
    assert steeper.rises_over(Change({1: 0.29})) == "cannot tell", "of one seed"
    assert (
        Change({0: 0.1, 1: -0.1}).rises() == Change({0: 0.1}).rises() == "cannot tell"
        and str(Change({})) == "no run"
    )
    (points,) = curves([row | {"x": 1} for row in rows if row["method"] == "a"], "x").values()
    assert points == [(1, 1.5, 1.0, 2.0)]


def test_the_commands_of_a_cluster_are_those_of_the_runs(capsys, tmp_path):
    main(["experiment", "freezing", "--tier", "paper", "--commands", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# freezing: {'frozen': 'no', 'seed': 0}"
    assert lines[1].startswith("torchrun --nproc-per-node 2 -m diloco train 550m ")
    assert lines[3].split().count("--diloco.freeze") == 1 and "hf:allenai/c4:en:train" in lines[3]


def test_equal_runs_are_one_command_with_all_labels(capsys, tmp_path):
    main(["experiment", "all", "--commands", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("torchrun ")]
    assert len(set(commands)) == len(commands) < len(lines) - len(commands)


def test_a_larger_batch_has_a_larger_learning_rate():
    tier = TIERS["small"]()
    rates = [tier.run(batch=batch).optimizer.learning_rate for batch in (1, 4)]
    assert rates[1] == 2 * rates[0] == 2 * tier.base_config.optimizer.learning_rate


def test_only_what_is_over_is_tabulated(capsys, tmp_path):
    from diloco.cli.experiment import _over

    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "freezing", "--tabulate", "--output", str(tmp_path)])
    assert "no run of freezing is over in" in capsys.readouterr().err
    one = experiment("freezing", TIERS["small"]())
    over = make_job(one.runs[1].config, tmp_path / "runs").directory
    over.mkdir(parents=True)
    (over / "summary.json").touch()
    assert list(_over(one, tmp_path, ()).runs) == [one.runs[1]]
    # Of what took place on another machine, there is the result; a failed run is not over.
    for run, result in ((0, {"summary": {}, "evaluated": {"outer": {"tasks": {}}}}), (2, {"failed": "no"})):
        directory = make_job(one.runs[run].config, tmp_path / "runs").directory
        directory.mkdir(parents=True)
        (directory / "result.json").write_text(json.dumps(result))
    assert list(_over(one, tmp_path, ()).runs) == list(one.runs[:2])
    # Where it lacks something the run is not: it would have to be trained to be asked.
    (tmp_path / "mine.jsonl").write_text("a question")
    assert list(_over(one, tmp_path, (tmp_path / "mine.jsonl",)).runs) == [one.runs[1]]
