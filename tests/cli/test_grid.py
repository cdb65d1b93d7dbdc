"""The progress of a grid, as the directories of its runs show it."""

import shutil
import time
from typing import Any

from rich.console import Console
from tests.experiments.runner.machines import tiny_config

from diloco.cli import _grid
from diloco.cli._grid import grid_progress, machines_of
from diloco.experiments.runner import job as jobs
from diloco.experiments.runner import machines
from diloco.experiments.runner.grid import LabelledRun, run_grid
from diloco.experiments.runner.job import Job


def test_runs_are_shown_while_they_train(small_corpus, finished_run, tmp_path, monkeypatch, capfd):
    def run(job: Job) -> dict[str, Any]:
        """Leave behind what a run has after 30 steps, for a moment."""
        job.directory.mkdir(parents=True)
        for file in ("data.json", "config.json"):
            shutil.copy(finished_run / file, job.directory)
        lines = (finished_run / "metrics-0.jsonl").read_text().splitlines(keepends=True)
        (job.directory / "metrics-0.jsonl").write_text("".join(lines[:30]))
        start, deadline = f"mine: {len(begun)} of 2 runs done", time.monotonic() + 20
        begun.append(job)
        monkeypatch.setitem(jobs._RUNNING, 0, job.directory)
        while not any(line.startswith(start) and "1 running" in line for line in shown):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        monkeypatch.delitem(jobs._RUNNING, 0)
        return {"failed": "it stopped", "is_final": True}

    def show(console: Console, *groups: Any, **options: Any) -> None:
        console_print(console, *groups, **options)
        shown.extend(str(line) for group in groups for line in getattr(group, "renderables", ()))

    begun, shown, console_print = list[Job](), list[str](), Console.print
    monkeypatch.setattr(Console, "print", show)
    monkeypatch.setattr(machines, "run_job", run)
    monkeypatch.setattr(_grid, "_SECONDS_BETWEEN_LINES", 0.2)
    runs = [
        LabelledRun(labels={"kind": "a", "seed": seed}, config=tiny_config(small_corpus, tmp_path, seed=seed))
        for seed in (0, 1)
    ]
    with grid_progress("mine") as on_progress:
        for _ in run_grid(runs, tmp_path / "runs", machines_of(1, None), on_progress=on_progress):
            pass
    printed = capfd.readouterr().err.splitlines()
    assert printed[0] == "mine: 0 of 2 runs done, 0 running, 2 left, 0.0%"
    assert any(line.startswith("mine: 0 of 2 runs done, 1 running, 1 left, 12.5%  ETA ") for line in printed)
    assert any(line.startswith("  seed=0  step 30/120  training loss ") and "  ETA " in line for line in printed)
    assert any(line.startswith("mine: 1 of 2 runs done (1 failed), 1 running, 0 left") for line in printed)
    assert printed[-1] == "mine: 2 of 2 runs done (2 failed), 0 running, 0 left, 100.0%"
