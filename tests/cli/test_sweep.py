"""`diloco sweep`: its table, its plan, and its refusals."""

import shutil

import pytest
from tests.experiments.runner.machines import Valley

from diloco.cli import sweep
from diloco.cli.main import main
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.training.records.runs import running


class MortalValley(Valley):
    """A machine that is interrupted after so many jobs; None is never."""

    killed_after: int | None = None

    def submit(self, job):
        if len(self.jobs) == self.killed_after:
            raise KeyboardInterrupt
        return super().submit(job)

    def close(self):
        assert self.killed_after is not None


@pytest.fixture(scope="module")
def text(small_corpus, tmp_path_factory) -> list[str]:
    """The flags of a corpus, with one cache for all tests."""
    cache = str(tmp_path_factory.mktemp("data"))
    return ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1", "--data.cache", cache]


def test_a_sweep_goes_on_from_its_table_alone(text, tmp_path, monkeypatch):
    axes = ["--axis", "width=32,48", "--axis", "num_replicas=1,2", "--axis", "batch_tokens=2048,4096,8192"]
    command = ["sweep", "tiny", "--method", "diloco", *text, *axes, "--then", "outer_learning_rate=0.4,0.6"]
    machine, outputs = MortalValley(), (tmp_path / "whole", tmp_path / "halved")
    monkeypatch.setattr(sweep, "machines_of", lambda *_: machine)
    main([*command, "--output", str(outputs[0])])
    whole = read_rows(outputs[0] / "sweep.csv")
    num_jobs = len(machine.jobs)
    # The last rows are those of `then`, which a call reaches after all others.
    write_rows(whole[3:], outputs[1] / "sweep.csv")
    machine.killed_after = num_jobs
    with pytest.raises(SystemExit, match="130"):
        main([*command, "--output", str(outputs[1])])
    remaining = read_rows(outputs[1] / "sweep.csv")
    assert {row["run"] for row in remaining} >= {row["run"] for row in whole[3:]}

    shutil.rmtree(outputs[1] / "runs")
    machine.killed_after = None
    main([*command, "--output", str(outputs[1])])
    assert read_rows(outputs[1] / "sweep.csv") == whole
    assert len(machine.jobs) - num_jobs == len({row["run"] for row in whole[:3]})


def test_a_second_sweep_adds_to_the_table(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "machines_of", lambda *_: Valley())
    command = ["sweep", "tiny", *text, "--axis", "num_replicas=0,1", "--output", str(tmp_path / "sweep")]
    main([*command, "--axis", "width=32"])
    assert "no laws yet: " in capsys.readouterr().out
    main([*command, "--axis", "width=48"])
    printed = capsys.readouterr()
    assert "2 runs, of which 0 failed, beside 2 that this command does not ask for\n" in printed.out
    assert "now: diloco scaling fit --data" in printed.out
    assert "sweep: 0 of 2 runs done, 0 running, 2 left, 0.0%" in printed.err, "where there is no terminal"
    assert "sweep: 2 of 2 runs done, 0 running, 0 left, 100.0%" in printed.err
    rows = read_rows(tmp_path / "sweep" / "sweep.csv")
    assert len({(row["params"], row["replicas"]) for row in rows}) == 4
    # Settings without a column must be the same, those with one may differ.
    main([*command, "--axis", "width=64", "--diloco.outer-learning-rate", "0.8"])
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--axis", "width=96", "--diloco.wire", "fp32"])
    assert "differ from these in more than its columns: choose another --output" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "sweep" / "sweep.csv")) == 6


def test_a_table_that_names_no_run_is_left_alone(text, tmp_path, capsys):
    write_rows([{"params": 1, "replicas": 0, "eval_loss": 2.0}], tmp_path / "sweep.csv")
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", "tiny", *text, "--axis", "num_replicas=0", "--output", str(tmp_path)])
    assert "sweep.csv is not a sweep's, as it names no run: choose another --output" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "sweep.csv")) == 1


def test_a_plan_shows_runs_and_cost(text, capsys):
    axes = ["--axis", "num_replicas=0,2", "--axis", "learning_rate=0.002,0.004"]
    main(["sweep", "tiny", *text, *axes, "--then", "outer_learning_rate=0.6,0.8", "--plan", "--cores", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + 3 and "replicas=0" in lines[0] and "learning_rate=0.002" in lines[0]
    assert lines[4] == "4 runs, and then up to 2:" and " hours on 2 cores" in lines[5]


def test_a_second_sweep_is_refused_while_the_first_runs(text, tmp_path, capsys):
    with running(tmp_path), pytest.raises(SystemExit, match="2"):
        main(["sweep", "tiny", *text, "--axis", "seed=0", "--output", str(tmp_path)])
    assert "trains there; wait for it, or choose another --output" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_counts_other_sizes_that_come_later(text, capsys):
    main(["sweep", "tiny", *text, "--axis", "num_replicas=0", "--then", "width=48,64", "--plan", "--cores", "2"])
    assert "1 runs, and then up to 2:" in capsys.readouterr().out


def test_a_seed_is_kept_to_its_last_digit(text, tmp_path, monkeypatch):
    machine = Valley()
    monkeypatch.setattr(sweep, "machines_of", lambda *_: machine)
    command = ["sweep", "tiny", *text, "--axis", "num_replicas=0", "--axis", "seed=9007199254740993"]
    main([*command, "--output", str(tmp_path)])
    assert [job.config.seed for job in machine.jobs] == [9007199254740993]
