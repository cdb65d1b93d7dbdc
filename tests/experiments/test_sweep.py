"""Sweeps over a made-up loss, on a machine that runs nothing."""

import math
import random
import shutil
from concurrent.futures import Future
from dataclasses import replace

import pytest

from diloco import cli_sweep
from diloco.cli.main import main
from diloco.data.config import DataConfig
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.experiments.runner.sweep import Sweep, run_sweep
from diloco.scaling.table import read_table
from diloco.training.recipes import recipe


class Valley:
    """Where the loss is lowest at a learning rate of 0.01, a batch of 4096 tokens a replica, and η = 0.6.

    Runs of `failing` replicas fail.
    """

    def __init__(self, failing: int | None = None, noise: float = 0.0) -> None:
        self.asked = []
        self.noise = noise
        self.failing = failing
        self.killed_after = None

    def submit(self, job):
        if len(self.asked) == self.killed_after:
            raise KeyboardInterrupt
        self.asked.append(job.config)
        config = job.config
        if config.num_replicas == self.failing:
            future: Future = Future()
            future.set_result({"failed": "diverged", "is_final": True})
            return future
        is_baseline = config.method == "data_parallel"
        octaves = math.log2(config.tokens_per_step / (4096 * config.num_replicas))
        loss = 3 + math.log(config.optimizer.learning_rate / 0.01) ** 2 + octaves**2 / 10
        # Larger batches want larger rates: the valley is a diagonal one.
        loss -= 0.5 * octaves * math.log(config.optimizer.learning_rate / 0.01)
        loss += 0 if is_baseline else (config.diloco.outer_learning_rate - 0.6) ** 2
        luck = random.Random(f"{config.seed} {config.optimizer.learning_rate}")
        loss += self.noise * luck.gauss(0, 1)
        summary = {"eval_loss": loss, "num_tokens": config.num_tokens, "num_steps": config.num_steps}
        names = ("eval_standard_error", "eval_bits_per_byte", "num_params", "outer_hash")
        summary |= dict.fromkeys((*names, "bytes_sent_per_replica", "data_parallel_bytes_per_replica"), 1)
        future: Future = Future()
        future.set_result({"summary": summary, "evaluated": {}, "outer_steps": []})
        return future


@pytest.fixture
def base(small_corpus, tmp_path):
    data = DataConfig(train=(str(small_corpus),), held_out_fraction=0.1, cache=tmp_path / "data")
    return replace(recipe("tiny"), data=data)


def swept(base, tmp_path, failing=None, **fields) -> tuple[list[dict], Valley]:
    machine = Valley(failing)
    sweep = Sweep(base=base, vocab_size=257, **fields)
    return list(run_sweep(sweep, tmp_path / "runs", machine))[-1], machine


def test_the_grid_is_extended_until_the_best_is_inside(base, tmp_path):
    axes = {"num_replicas": (0, 2), "learning_rate": (0.0025, 0.0035), "batch_tokens": (1024, 2048)}
    rows, machine = swept(base, tmp_path, axes=axes)
    for replicas in (0, 2):
        mine = [row for row in rows if row["replicas"] == replicas]
        best = min(mine, key=lambda row: row["eval_loss"])
        assert best["learning_rate"] == pytest.approx(0.01, rel=0.15)
        around = [row for row in mine if 0.5 <= row["batch_tokens"] / best["batch_tokens"] <= 2]
        around = [row for row in around if 0.7 <= row["learning_rate"] / best["learning_rate"] <= 1.5]
        assert len(around) == 9
        assert best["batch_tokens"] == 4096 * max(1, replicas)
        for name in ("learning_rate", "batch_tokens"):
            values = [row[name] for row in mine]
            assert min(values) < best[name] < max(values)
        ratios = sorted({row["learning_rate"] for row in mine if row["learning_rate"] > 0.0035})
        assert ratios[0] == pytest.approx(0.0035 * math.sqrt(2))
    assert len(machine.asked) == len(rows) == len({row["run"] for row in rows})


def test_another_axis_follows_at_the_best_of_each_group(base, tmp_path):
    axes = {"width": (32, 48), "num_replicas": (0, 1), "learning_rate": (0.0035, 0.005, 0.007)}
    rows, _ = swept(base, tmp_path, axes=axes, then={"outer_learning_rate": (0.4, 0.6, 0.8)})
    for params in {row["params"] for row in rows}:
        later = [r for r in rows if r["params"] == params and r["replicas"] == 1 and r["learning_rate"] == 0.005]
        assert sorted(row["outer_learning_rate"] for row in later) == [0.4, 0.6, 0.8]
    assert all("outer_learning_rate" not in row for row in rows if row["replicas"] == 0)
    assert len(rows) == 2 * 2 * 3 + 2 * 2  # 0.4 is the recipe's own


def test_seeds_are_extended_and_varied_together(base, tmp_path):
    """Each seed alone would end at a learning rate of its own."""
    axes = {"seed": (0, 1, 2), "learning_rate": (0.0025, 0.0035, 0.005)}
    base, then = replace(base, num_replicas=1), {"outer_learning_rate": (0.6,)}
    sweep = Sweep(base=base, vocab_size=257, axes=axes, then=then)
    rows = list(run_sweep(sweep, tmp_path / "runs", Valley(noise=0.1)))[-1]
    tried: dict[float, set[int]] = {}
    for row in rows:
        tried.setdefault(row["learning_rate"], set()).add(row["seed"])
    later = [row for row in rows if row["outer_learning_rate"] == 0.6]
    assert len({row["learning_rate"] for row in later}) == 1 and sorted(row["seed"] for row in later) == [0, 1, 2]
    assert len(tried) > 3 and all(seeds == {0, 1, 2} for seeds in tried.values())


def test_what_failed_everywhere_is_not_varied_further(base, tmp_path):
    axes = {"num_replicas": (1, 2), "learning_rate": (0.0035, 0.005, 0.007)}
    rows, machine = swept(base, tmp_path, failing=2, axes=axes, then={"outer_learning_rate": (0.6, 0.8)})
    assert len([row for row in rows if row["replicas"] == 1]) == 3 + 2
    assert [row["failed"] for row in rows if row["replicas"] == 2] == 3 * ["diverged"]
    assert len([config for config in machine.asked if config.num_replicas == 2]) == 3


def test_a_sweep_goes_on_from_its_table_alone(small_corpus, tmp_path, monkeypatch):
    text = ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(tmp_path)]
    axes = ["--axis", "width=32,48", "--axis", "num_replicas=1,2", "--axis", "batch_tokens=2048,4096,8192"]
    asked = ["sweep", "tiny", "--method", "diloco", *text, *axes, "--then", "outer_learning_rate=0.4,0.6"]
    machine, outputs = Valley(), (tmp_path / "whole", tmp_path / "halved")
    monkeypatch.setattr(cli_sweep, "machines_of", lambda *_: machine)
    main([*asked, "--output", str(outputs[0])])
    whole = read_rows(outputs[0] / "sweep.csv")
    num_asked = len(machine.asked)
    # The last rows are of the later axis, to which a call comes after all others.
    write_rows(whole[3:], outputs[1] / "sweep.csv")
    machine.killed_after = num_asked
    with pytest.raises(SystemExit, match="130"):
        main([*asked, "--output", str(outputs[1])])
    left = read_rows(outputs[1] / "sweep.csv")
    assert {row["run"] for row in left} >= {row["run"] for row in whole[3:]}

    shutil.rmtree(outputs[1] / "runs")
    machine.killed_after = None
    main([*asked, "--output", str(outputs[1])])
    assert read_rows(outputs[1] / "sweep.csv") == whole
    assert len(machine.asked) - num_asked == len({row["run"] for row in whole[:3]})


def test_a_second_sweep_adds_to_the_table(small_corpus, tmp_path, monkeypatch, capsys):
    text = ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(tmp_path)]
    monkeypatch.setattr(cli_sweep, "machines_of", lambda *_: Valley())
    asked = ["sweep", "tiny", *text, "--axis", "num_replicas=0,1", "--output", str(tmp_path / "sweep")]
    main([*asked, "--axis", "width=32"])
    assert "no laws yet: " in capsys.readouterr().out
    main([*asked, "--axis", "width=48"])
    told = capsys.readouterr()
    assert "2 runs, of which 0 failed, beside 2 that this command does not ask for\n" in told.out
    assert "now: diloco scaling fit --data" in told.out
    assert "sweep: 100.0% done" in told.err, "where there is no terminal"
    rows = read_rows(tmp_path / "sweep" / "sweep.csv")
    assert len({(row["params"], row["replicas"]) for row in rows}) == 4
    # What has no column must be the same; of what has one, anything goes.
    main([*asked, "--axis", "width=64", "--diloco.outer-learning-rate", "0.8", "--optimizer.learning-rate", "0.1"])
    for other in (["--diloco.wire", "fp32"], ["--micro-batch", "2"]):
        with pytest.raises(SystemExit, match="2"):
            main([*asked, "--axis", "width=96", *other])
    assert "differ from these in more than its columns tell: choose another --output" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "sweep" / "sweep.csv")) == 6


def test_a_table_that_names_no_run_is_left_alone(small_corpus, tmp_path, capsys):
    text = ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(tmp_path)]
    write_rows([{"params": 1, "replicas": 0, "eval_loss": 2.0}], tmp_path / "sweep.csv")
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", "tiny", *text, "--axis", "num_replicas=0", "--output", str(tmp_path)])
    assert "sweep.csv is not a sweep's, as it names no run: choose another --output" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "sweep.csv")) == 1


def test_the_budget_follows_from_the_size_and_the_table_is_what_scaling_reads(base, tmp_path):
    rows, machine = swept(base, tmp_path, axes={"width": (32, 64), "num_replicas": (4,)}, tokens_per_param=5)
    for row, config in zip(rows, machine.asked, strict=True):
        assert row["tokens"] == config.num_tokens == pytest.approx(5 * row["params"], rel=0.01)
        assert config.global_batch % 4 == 0
    write_rows(rows, tmp_path / "sweep.csv")
    points = read_table(tmp_path / "sweep.csv")
    assert [point.replicas for point in points] == [4, 4]
    assert points[0].settings["outer_learning_rate"] == 0.4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--axis", "momentum=0.9"], "'momentum' is not an axis: choose from width, num_replicas"),
        (["--axis", "learning_rate=high"], "'learning_rate=high' is not of the form NAME=NUMBER"),
        (["--axis", "num_replicas=3"], "batch_tokens=512 must be a multiple of num_replicas=3"),
        (["--axis", "width=32.5"], "the axis width takes whole numbers, not 32.5"),
        (["--axis", "batch_tokens=0"], "the axis batch_tokens takes finite numbers above 0, not 0"),
        (["--axis", "learning_rate=inf"], "the axis learning_rate takes finite numbers above 0, not inf"),
        (["--axis", "num_replicas=-1"], "the axis num_replicas takes finite numbers of 0 or more, not -1"),
        (["--then", "num_replicas=3"], "batch_tokens=512 must be a multiple of num_replicas=3"),
        (["--then", "width=33"], "width=33"),
        (["--axis", "seed=0", "--tokens-per-param", "-5"], "tokens_per_param=-5 must be above 0 and finite"),
        (["--axis", "seed=0", "--method", "data_parallel"], "leave out --method data_parallel"),
        (["--axis", "seed=0", "--axis", "seed=1"], "the axis seed is named twice"),
        ([], "name what to vary, such as --axis"),
        (["--axis", "seed=0", "--cores", "1", "--ray", "auto"], "--cores 1 is of this machine, and --ray auto"),
        (["--num-tokens", "5120"], "leave out --num-tokens"),
        (["--plan", "--cores", "0"], "--cores must be at least 1, not 0"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, small_corpus, tmp_path, capsys):
    text = ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", "tiny", *text, *arguments])
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


def test_a_plan_tells_runs_and_cost(small_corpus, tmp_path, capsys):
    text = ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(tmp_path)]
    axes = [
        "--axis",
        "num_replicas=0,2",
        "--axis",
        "learning_rate=0.002,0.004",
        "--then",
        "outer_learning_rate=0.6,0.8",
    ]
    main(["sweep", "tiny", *text, *axes, "--plan", "--cores", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + 3 and "replicas=0" in lines[0] and "learning_rate=0.002" in lines[0]
    assert lines[4] == "4 runs, and then up to 2:" and " hours on 2 cores" in lines[5]
