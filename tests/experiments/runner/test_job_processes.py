"""Processes of jobs: one ancestor forks them, and they end with the process that asked for them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.experiments.runner.machines import labelled_runs, tiny_config

from diloco.errors import UserError
from diloco.experiments.runner import job as jobs
from diloco.experiments.runner.grid import make_job
from diloco.experiments.runner.job import Job, end_running_jobs, run_job, running_jobs
from diloco.training.processes import Ancestor, Call, launch, prepared, under_a_launcher
from diloco.training.records.runs import check_not_running

pytestmark = pytest.mark.slow
LONG = 1 << 24
"""Tokens of a run that is ended before."""


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def endless(corpus: Path, folder: Path, seed: int) -> Job:
    return make_job(tiny_config(corpus, folder, num_tokens=LONG, seed=seed), folder / "runs")


def has_begun(job: Job) -> bool:
    metrics = job.directory / "metrics-0.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@pytest.mark.usefixtures("forked_pythons")
def test_jobs_of_one_ancestor_are_ended_and_killed(small_corpus, tmp_path):
    first, second = (endless(small_corpus, tmp_path, seed) for seed in (0, 1))
    with ThreadPoolExecutor() as threads:
        killed, ended = threads.submit(run_job, first), threads.submit(run_job, second)
        wait_for(lambda: has_begun(first) and has_begun(second))
        assert {*running_jobs()} == {first.directory, second.directory} and len(jobs._ANCESTORS) == 1
        with pytest.raises(UserError, match=rf"{first.directory.name} is in use: process \d+ on "):
            check_not_running(first.directory)
        (call,) = (call for call, path in jobs._RUNNING.items() if path == first.directory)
        os.kill(call.pid, signal.SIGKILL)
        failed = killed.result(timeout=30)
        assert failed == {
            "failed": f"the run's process was killed, or met a bug: see {first.directory.name}/log.txt",
            "is_final": False,
        }
        assert running_jobs() == (second.directory,)
        end_running_jobs()
        assert ended.result(timeout=30)["failed"].startswith("stopped by SIGTERM: step ")
    assert not running_jobs()


@pytest.mark.usefixtures("forked_pythons")
def test_a_job_may_be_larger_than_a_sockets_buffer(small_corpus, tmp_path):
    config = tiny_config(small_corpus, tmp_path, num_tokens=1)
    job = replace(make_job(config, tmp_path / "runs"), tasks={str(i): Path("x" * 200) for i in range(5000)})
    with ThreadPoolExecutor(1) as threads:
        assert "num_tokens=1" in threads.submit(run_job, job).result(timeout=60)["failed"]


@pytest.mark.usefixtures("forked_pythons")
def test_the_ancestor_outlives_the_thread_that_started_it(small_corpus, tmp_path):
    job = make_job(labelled_runs(small_corpus, tmp_path)[-1].config, tmp_path / "runs")
    while jobs._ANCESTORS:
        jobs._ANCESTORS.pop().close()
    for _ in range(2):
        with ThreadPoolExecutor(1) as threads:
            failed = threads.submit(run_job, job).result(timeout=60)
        assert failed["is_final"] and "layers_per_fragment=7" in failed["failed"]
        time.sleep(0.2)
        assert jobs._ANCESTORS[0].is_alive


SCRIPT = """
import sys
from pathlib import Path
from tests.experiments.runner.test_job_processes import endless
from diloco.experiments.runner.job import _ANCESTORS, run_job
_ANCESTORS.clear()  # that of the process that forked this one
run_job(endless(Path(sys.argv[1]), Path(sys.argv[2]), 2))
"""


def is_still(path: Path) -> bool:
    """True if nothing is added to a file for half a second, in which a replica takes many steps."""
    size = path.stat().st_size
    time.sleep(0.5)
    return path.stat().st_size == size


@pytest.mark.usefixtures("forked_pythons")
def test_jobs_end_with_the_process_that_asked_for_them(small_corpus, tmp_path):
    job = endless(small_corpus, tmp_path, 2)
    command = [sys.executable, "-c", SCRIPT, str(small_corpus), str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], stderr=subprocess.PIPE) as grid:
        wait_for(lambda: has_begun(job) or grid.poll() is not None)
        grid.kill()
        # All of its processes have its standard error, or the log, as theirs.
        assert grid.communicate(timeout=30) == (None, b"")
    wait_for(lambda: is_still(job.directory / "metrics-0.jsonl"))


@pytest.mark.usefixtures("forked_pythons")
def test_a_job_that_is_ended_while_it_starts_does_not_train(small_corpus, tmp_path, monkeypatch):
    job, ancestor = endless(small_corpus, tmp_path, seed=2), jobs._ancestor

    def ended() -> Ancestor:
        end_running_jobs()  # it has no number yet
        return ancestor()

    monkeypatch.setattr(jobs, "_ancestor", ended)
    with ThreadPoolExecutor(1) as threads:
        failed = threads.submit(run_job, job).result(timeout=60)
    assert not failed["is_final"] and not has_begun(job)


def count_threads(folder: str) -> None:
    """The entrypoint of a replica that writes down its threads."""
    facts = [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["WORLD_SIZE"]]
    Path(folder, os.environ["RANK"]).write_text(json.dumps(facts))


def job_that_counts(job: Job) -> Any:
    """Be the process of a job that trains nothing, but has two replicas."""

    def result(job: Job) -> dict[str, Any]:
        with prepared():
            launch(count_threads, 2, 1, str(job.directory))
        return {"threads": torch.get_num_threads(), "launcher": under_a_launcher()}

    jobs.result_of = result
    return jobs._be_job(job)


def test_a_job_and_its_replicas_have_one_thread_whatever_started_the_grid(small_corpus, tmp_path, monkeypatch):
    job = endless(small_corpus, tmp_path, seed=2)
    job.directory.mkdir(parents=True)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "5"}.items():
        monkeypatch.setenv(name, value)
    with Ancestor("spawn") as ancestor:
        assert ancestor.run(Call(job_that_counts, job)) == {"threads": 1, "launcher": False}
    for rank in "01":
        assert json.loads((job.directory / rank).read_text()) == [1, "1", "2"]
