"""The progress of a grid whose runs are real processes that do what a run's directory shows."""

import shlex
import sys

from tests.experiments.runner.machines import tiny_config

from diloco.cli import _grid
from diloco.cli._grid import grid_progress, machines_of
from diloco.experiments.runner.grid import LabelledRun, run_grid


def test_runs_are_shown_while_they_train(small_corpus, finished_run, tmp_path, monkeypatch, capfd):
    run, answer = shlex.quote(str(finished_run)), '{"failed": "it stopped", "is_final": true}'
    # The last argument of a job's process is the directory of its run.
    script = (
        f"#!/bin/bash\ncp {run}/config.json $3; head -30 {run}/metrics-0.jsonl > $3/metrics-0.jsonl; sleep 0.6\n"
    )
    (tmp_path / "python").write_text(f"{script}echo '{answer}'\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
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
    assert any(line.startswith("  seed=0  step 30/120  loss ") and "  ETA " in line for line in printed)
    assert any(line.startswith("mine: 1 of 2 runs done (1 failed), 1 running, 0 left") for line in printed)
    assert printed[-1] == "mine: 2 of 2 runs done (2 failed), 0 running, 0 left, 100.0%"
