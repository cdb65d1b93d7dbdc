"""Grids of runs: which jobs are run, and what remains after a kill."""

import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import spawn
from pathlib import Path

import pytest
from tests.experiments.runner.machines import HALF, FakeMachine, labelled_runs, tiny_config
from tests.processes import Program, program

from diloco.errors import UserError
from diloco.experiments.runner import job as jobs
from diloco.experiments.runner import machines
from diloco.experiments.runner.grid import adopt, make_job, read_result, run_grid, run_name
from diloco.experiments.runner.machines import LocalMachine
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.training.config.recipes import recipe
from diloco.training.processes import Ancestor


def rows_of(runs, directory, machine, **options):
    return list(run_grid(runs, directory, machine, **options))[-1]


def test_equal_configs_are_run_once_even_by_another_grid(small_corpus, tmp_path):
    runs, machine, shares = labelled_runs(small_corpus, tmp_path), FakeMachine(), []
    rows = rows_of(runs, tmp_path / "runs", machine, on_progress=lambda progress: shares.append(progress.part()))
    assert len(machine.jobs) == 3 and [row["kind"] for row in rows] == ["first", "same", "two", "wrong"]
    assert rows[0]["run"] == rows[1]["run"] != rows[2]["run"]
    assert [job.config.num_processes for job in machine.jobs] == [1, 1, 2]
    assert sorted(set(shares)) == pytest.approx([0, 1 / 3, 2 / 3, 1]) and sorted(shares) == shares
    again = FakeMachine()
    assert rows_of(runs[1:], tmp_path / "runs", again) == rows[1:] and not again.jobs


@pytest.mark.parametrize(
    ("field", "own", "other"),
    [("outer_learning_rate", 0.4, 0.8), ("outer_momentum", 0.9, 0.0), ("wire", "e3m0", "fp32")],
)
def test_a_value_of_the_method_or_the_outer_rule_makes_no_other_run(field, own, other):
    config = recipe("tiny")
    left_out, same, differs = (
        run_name(replace(config, diloco=replace(config.diloco, **{field: value}))) for value in (None, own, other)
    )
    assert left_out == same != differs


def test_a_grid_goes_on_from_its_rows_alone(small_corpus, tmp_path):
    runs = labelled_runs(small_corpus, tmp_path)[1:3]
    rows = rows_of(runs, tmp_path / "here", FakeMachine())
    adopt([rows[0], {**rows[1], "failed": "lost"}], tmp_path / "there")
    machine = FakeMachine()
    assert rows_of(runs, tmp_path / "there", machine) == rows
    assert [job.config.num_replicas for job in machine.jobs] == [2], "a failed run is run again"
    # A table does not hold the parameters that a task would need.
    machine = FakeMachine()
    rows_of(runs[:1], tmp_path / "there", machine, tasks=(tmp_path / "task.jsonl",))
    assert len(machine.jobs) == 1


def test_two_precisions_of_auto_are_not_compared(small_corpus, tmp_path):
    one, _, two, _ = labelled_runs(small_corpus, tmp_path)
    (row,) = rows_of([one], tmp_path / "runs", FakeMachine())
    (tmp_path / "runs" / row["run"] / "result.json").unlink()
    adopt([{**row, "precision": "bf16"}], tmp_path / "runs")
    with pytest.raises(
        UserError, match=rf"auto was bf16 on the machine of {row['run']}, and fp32 on that of run-"
    ):
        rows_of([one, two], tmp_path / "runs", FakeMachine())
    asked_for = replace(two, config=replace(two.config, precision="fp32"))
    assert [row["precision"] for row in rows_of([one, asked_for], tmp_path / "runs", FakeMachine())] == [
        "bf16",
        "fp32",
    ]


def test_a_row_counts_for_a_grid_that_asks_for_no_more_than_it_has(small_corpus, tmp_path):
    runs, task = labelled_runs(small_corpus, tmp_path)[2:3], tmp_path / "task.jsonl"
    task.write_text("a question")
    everything = {"tasks": (task,), "parameters": ("replica",), "with_curves": True}
    less = [{}, {"tasks": (task,)}, {"parameters": ("replica",)}, {"with_curves": True}, everything]
    here = [rows_of(runs, tmp_path / "here", FakeMachine(), **options) for options in less]
    assert len({tuple(row) for (row,) in here}) == len(less), "of different columns"
    # Two tables, neither of which has all: their columns add up.
    adopt(here[1], tmp_path / "there")
    machine = FakeMachine()
    assert rows_of(runs, tmp_path / "there", machine, tasks=(task,)) == here[1] and not machine.jobs
    adopt([*here[2], *here[3]], tmp_path / "there")
    for options, rows in zip(less, here, strict=True):
        (row,) = rows_of(runs, tmp_path / "there", machine, **options)
        assert (row, set(row)) == (rows[0], set(rows[0])) or options is everything
        assert not machine.jobs or options is everything
    assert [job.parameters for job in machine.jobs] == [("replica",)], "the replica was never scored on the task"


def test_a_run_is_scored_again_only_if_a_task_is_new_or_has_changed(small_corpus, tmp_path):
    runs, machine = labelled_runs(small_corpus, tmp_path)[2:3], FakeMachine()
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    mine.write_text("a")
    theirs.write_text("b")
    options = {"parameters": ("replica",)}

    def num_jobs_after(*tasks: Path) -> int:
        (row,) = rows_of(runs, tmp_path / "runs", machine, tasks=tasks, **options)
        assert {name for name in row if name.endswith("_acc")} == {f"{task.stem}_acc" for task in tasks}
        return len(machine.jobs)

    counts = [num_jobs_after(*tasks) for tasks in ((), (mine,), (mine,), (), (theirs,), (mine,))]
    assert counts == [1, 2, 2, 2, 3, 3]
    options["parameters"] = ()
    mine.write_text("c")
    assert [num_jobs_after(mine), num_jobs_after(mine), num_jobs_after(theirs)] == [4, 4, 4]
    # The replica's own parameters were scored on the earlier questions.
    options["parameters"] = ("replica",)
    assert num_jobs_after(mine) == 5


def test_a_failure_replaces_no_result(small_corpus, tmp_path):
    runs, task = labelled_runs(small_corpus, tmp_path)[:1], tmp_path / "mine.jsonl"
    (row,) = rows_of(runs, tmp_path / "runs", FakeMachine())
    task.write_text("a question")
    failing = FakeMachine({"failed": "not so", "is_final": True})
    (failed,) = rows_of(runs, tmp_path / "runs", failing, tasks=(task,))
    assert failed["failed"] == "not so" and len(failing.jobs) == 1
    assert rows_of(runs, tmp_path / "runs", failing) == [row] and len(failing.jobs) == 1


def test_a_damaged_result_is_refused(small_corpus, tmp_path):
    job = make_job(labelled_runs(small_corpus, tmp_path)[0].config, tmp_path / "runs")
    job.directory.mkdir(parents=True)
    (job.directory / "result.json").write_text("{")
    with pytest.raises(UserError, match=r"result\.json can.t be read.*: delete it"):
        read_result(job)


def test_cosines_are_averaged_by_third_by_tenth_and_by_block(small_corpus, tmp_path):
    runs = labelled_runs(small_corpus, tmp_path)[2:3]
    (row,) = rows_of(runs, tmp_path / "runs", FakeMachine(), with_curves=True)
    assert row["cosine_first_third"] == pytest.approx(0.15) and row["cosine_middle_third"] == 0.5
    assert row["cosine_last_third"] == 0.9 and row["cosine_block_1"] == 0.5
    # Of steps 1, 2, 5 and 9 of 9; at the last, the last fragment was merged.
    assert {name: row[name] for name in row if "_at_" in name} == {
        "cosine_at_15": 0.1,
        "cosine_at_25": 0.2,
        "cosine_at_55": 0.5,
        "embedding_cosine_at_95": 0.9,
    }
    (plain,) = rows_of(runs, tmp_path / "runs", FakeMachine())
    assert plain == {name: value for name, value in row.items() if "_at_" not in name}


def test_a_run_is_evaluated_at_a_step_of_its_own(small_corpus, tmp_path):
    (run,) = labelled_runs(small_corpus, tmp_path)[2:3]
    machine = FakeMachine()
    half, end = run, replace(run, at_step=None)
    for one, loss in ((half, 2.0), (end, 1.0), (half, 2.0)):
        assert [row["eval_loss"] for row in rows_of([one], tmp_path / "runs", machine)] == [loss]
    assert [job.at_step for job in machine.jobs] == [HALF], "its summary has the loss at the end, too"


def run_script(corpus: Path, output: Path, *kinds: str) -> None:
    """Run a grid of runs of some kinds, and write its table as they finish."""
    runs = [run for run in labelled_runs(corpus, output) if run.labels["kind"] in kinds]
    options = {"parameters": ("replica", "average")}
    with Ancestor("fork") as ancestor:  # a spawned one would import torch
        jobs._ANCESTORS.append(ancestor)
        for rows in run_grid(runs, output / "runs", LocalMachine(1), **options):
            write_rows(rows, output / "grid.csv")
            if "to be killed" in kinds and len(rows) == 3:  # all but the run that is not over
                time.sleep(1000)


def start(corpus: Path, output: Path, *kinds: str) -> AbstractContextManager[Program]:
    output.mkdir(exist_ok=True)
    return program(run_script, corpus, output, *kinds, folder=output)


def results(output: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (output / "runs").glob("*/result.json")}


@pytest.fixture(scope="module")
def trained(small_corpus, tmp_path_factory) -> Path:
    """A grid that was killed in its second run, and called again; beside it, that run undisturbed."""
    folder = tmp_path_factory.mktemp("grids")
    output, kinds = folder / "killed", ("first", "same", "two", "wrong")
    with (
        start(small_corpus, folder / "alone", "two") as alone,
        start(small_corpus, output, *kinds, "to be killed") as killed,
    ):
        deadline = time.monotonic() + 200
        while not results(output) or len(list((output / "runs").glob("*/metrics-0.jsonl"))) < 2:
            assert time.monotonic() < deadline and killed.process.exitcode is None
            time.sleep(0.05)
        os.kill(killed.pid, signal.SIGKILL)
        finished = results(output)
        assert 0 < len(finished) < 3
        # The job that the killed grid started may still be running.
        with start(small_corpus, output, *kinds) as again:
            assert again.wait(200).returncode == alone.wait(200).returncode == 0
    assert finished.items() <= results(output).items()
    return folder


@pytest.mark.slow
def test_a_killed_grid_goes_on_and_repeats_nothing(trained):
    first, same, two, wrong = read_rows(trained / "killed" / "grid.csv")
    assert [two] == read_rows(trained / "alone" / "grid.csv")
    assert first["eval_loss"] == same["eval_loss"] != two["eval_loss"]
    assert len({two[f"eval_loss{suffix}"] for suffix in ("", "_replica", "_average")}) == 3
    summary = json.loads((trained / "killed" / "runs" / two["run"] / "summary.json").read_text())
    assert two["eval_loss"] > summary["eval_loss"], "halfway"
    assert "layers_per_fragment=7 is more than the model's 2 blocks" in wrong["failed"]


@pytest.mark.slow
def test_a_failure_is_tried_again_unless_it_is_final(small_corpus, tmp_path, trained, monkeypatch):
    shutil.copytree(trained / "killed" / "runs", tmp_path / "runs")
    runs = labelled_runs(small_corpus, trained)
    again = FakeMachine()
    (row,) = rows_of(runs[-1:], tmp_path / "runs", again)
    assert "layers_per_fragment=7" in row["failed"] and not again.jobs
    (row,) = rows_of(runs[:1], tmp_path / "runs", LocalMachine(), tasks=(tmp_path / "piqa.jsonl",))
    assert "piqa.jsonl can't be read" in row["failed"]
    jobs._ANCESTORS.pop().close()  # the next job needs another
    with monkeypatch.context() as broken:
        broken.setattr(spawn, "_python_exe", b"/bin/false")
        (row,) = rows_of(runs[:1], tmp_path / "others", LocalMachine())
    assert "the run's process could not be started" in row["failed"]
    (row,) = rows_of(runs[:1], tmp_path / "others", again)
    assert "failed" not in row and len(again.jobs) == 1


def test_a_machine_runs_as_many_at_once_as_it_has_cores(small_corpus, tmp_path, monkeypatch):
    one = make_job(tiny_config(small_corpus, tmp_path), tmp_path)
    two = make_job(tiny_config(small_corpus, tmp_path, num_replicas=2), tmp_path)
    num_busy, most, lock = 0, 0, threading.Lock()

    def run(job):
        nonlocal num_busy, most
        with lock:
            num_busy += job.config.num_processes
            most = max(most, num_busy)
        time.sleep(0.05)
        with lock:
            num_busy -= job.config.num_processes
        return {}

    monkeypatch.setattr(machines, "run_job", run)
    machine = LocalMachine(3)
    for future in [machine.submit(job) for job in (two, one, two, one, one, two)]:
        future.result(timeout=20)
    assert most == 3
    with pytest.raises(UserError, match="cores=0 must be at least 1"):
        LocalMachine(0)


def test_no_job_waits_while_later_ones_run(small_corpus, tmp_path, monkeypatch):
    begun: list[int] = []

    def run(job):
        begun.append(job.config.seed)
        time.sleep(0.01)
        return {}

    monkeypatch.setattr(machines, "run_job", run)
    config = tiny_config(small_corpus, tmp_path, num_replicas=4)  # one job at a time, for which three threads wait
    machine = LocalMachine(3)
    for future in [machine.submit(make_job(replace(config, seed=seed), tmp_path)) for seed in range(20)]:
        future.result(timeout=20)
    assert begun == [*range(20)]


def test_a_closed_machine_begins_nothing(small_corpus, tmp_path, monkeypatch):
    begun, may_end, jobs = threading.Event(), threading.Event(), []

    def run(job):
        jobs.append(job)
        begun.set()
        assert may_end.wait(20)
        return {}

    monkeypatch.setattr(machines, "run_job", run)
    two = make_job(tiny_config(small_corpus, tmp_path, num_replicas=2), tmp_path)
    machine = LocalMachine(2)
    first, second = machine.submit(two), machine.submit(two)
    assert begun.wait(20)
    machine.close()
    may_end.set()
    assert first.result(timeout=20) == {}
    with pytest.raises(CancelledError):
        second.result(timeout=20)
    assert jobs == [two]


def test_a_run_that_failed_here_takes_the_result_of_another_machine(small_corpus, tmp_path):
    runs, failing = (
        labelled_runs(small_corpus, tmp_path)[:1],
        FakeMachine({"failed": "lower it", "is_final": True}),
    )
    for place in ("there", "adopted", "finished"):
        rows = rows_of(runs, tmp_path / place, FakeMachine() if place == "there" else failing)
        assert ("failed" in rows[0]) is (place != "there")
    (row,) = rows_of(runs, tmp_path / "there", FakeMachine())
    adopt([row], tmp_path / "adopted")
    machine = FakeMachine()
    assert rows_of(runs, tmp_path / "adopted", machine) == [row] and not machine.jobs
    (make_job(runs[0].config, tmp_path / "finished").directory / "summary.json").write_text("{}")
    assert rows_of(runs, tmp_path / "finished", machine) == [row] and len(machine.jobs) == 1
