"""Grids of runs: what is run, what is not, and what is left after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.data.config import DataConfig
from diloco.data.prepare import prepare, resolve
from diloco.data.tokenizers import train_bpe
from diloco.errors import CheckpointError
from diloco.experiments import grid
from diloco.experiments import job as one_job
from diloco.experiments.runner.grid import LabelledRun, LocalMachine, make_job, run_grid
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.training.launcher import FAILURE, exit_code_of
from diloco.training.recipes import recipe

SCRIPT = """
import sys
from pathlib import Path
from tests.experiments.test_grid import real_runs
from diloco.experiments.runner.grid import LocalMachine, run_grid
from diloco.experiments.runner.rows import write_rows

output = Path(sys.argv[2])
wanted = {"parameters": ("replica", "average")}
for rows in run_grid(real_runs(Path(sys.argv[1]), output), output / "runs", LocalMachine(1), **wanted):
    write_rows(rows, output / "grid.csv")
"""


def config(corpus: Path, output: Path, **changes):
    tiny = recipe("tiny")
    data = DataConfig(train=(str(corpus),), held_out_fraction=0.1, cache=output / "data")
    model = replace(tiny.model, num_layers=2)
    defaults = {"num_replicas": 1, "model": model, "num_tokens": 20 * tiny.tokens_per_step, "data": data}
    return replace(tiny, **(defaults | changes))


def real_runs(corpus: Path, output: Path) -> list[LabelledRun]:
    """Five of which two are equal, one has two replicas, and one fails."""
    one = config(corpus, output)
    rates = {"low": 1e-3, "same": 1e-3, "other": 2e-3}
    runs = [
        LabelledRun(
            labels={"rate": name}, config=replace(one, optimizer=replace(one.optimizer, learning_rate=rate))
        )
        for name, rate in rates.items()
    ]
    wrong = replace(one, diloco=replace(one.diloco, layers_per_fragment=7))
    runs.append(LabelledRun(labels={"rate": "two"}, config=replace(one, num_replicas=2)))
    return [*runs, LabelledRun(labels={"rate": "wrong"}, config=wrong)]


class Instead:
    """A machine that runs nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked, self.answer = [], None

    def submit(self, job):
        self.asked.append(job)
        future: Future = Future()
        if self.answer is not None:
            future.set_result(dict(self.answer))
            return future
        summary = dict.fromkeys(
            ("eval_loss", "eval_standard_error", "eval_bits_per_byte", "num_params", "bytes_sent_per_replica"), 1.0
        )
        summary |= {"data_parallel_bytes_per_replica": 2, "outer_hash": "ab", "num_tokens": 7, "num_steps": 9}
        outer_steps = [
            {"sent_step": step, "cosine": step / 10, "layer_cosine": {"blocks.1": 0.5}} for step in (1, 2, 5, 9)
        ]
        tasks = {task.stem: {"acc": 0.25} for task in job.tasks}
        evaluated = {name: {"eval_loss": 2.0, "tasks": tasks} for name in ("outer", *job.parameters)}
        future.set_result({"summary": summary, "evaluated": evaluated, "outer_steps": outer_steps})
        return future


def rows_of(runs, directory, machine, **options):
    return list(run_grid(runs, directory, machine, **options))[-1]


def test_equal_configs_are_run_once_also_by_another_grid(small_corpus, tmp_path):
    runs, machine = real_runs(small_corpus, tmp_path), Instead()
    parts = []
    rows = rows_of(runs, tmp_path / "runs", machine, on_finished=parts.append)
    assert len(machine.asked) == 4 and [r["rate"] for r in rows] == ["low", "same", "other", "two", "wrong"]
    assert rows[0]["run"] == rows[1]["run"] != rows[2]["run"]
    assert parts == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4, 1])
    again = Instead()
    assert rows_of(runs[1:], tmp_path / "runs", again) == rows[1:] and not again.asked
    # The name, the place and the cache of a config are not what is run.
    renamed = replace(runs[0].config, name="x", data=replace(runs[0].config.data, cache=tmp_path / "elsewhere"))
    assert (
        make_job(renamed, tmp_path / "runs", ()).directory
        == make_job(runs[0].config, tmp_path / "runs", ()).directory
    )


def test_a_run_is_known_by_its_text_wherever_that_lies(small_corpus, tmp_path):
    def directory(corpus: Path) -> str:
        return make_job(config(corpus, tmp_path), tmp_path / "runs").directory.name

    copy = tmp_path / "elsewhere" / small_corpus.name
    copy.parent.mkdir()
    copy.write_bytes(small_corpus.read_bytes())
    assert directory(copy) == directory(small_corpus)
    copy.write_bytes(small_corpus.read_bytes() + b'{"text": "one more"}\n')
    assert directory(copy) != directory(small_corpus)


def test_a_run_is_known_by_what_was_prepared_and_the_tokenizers_file(small_corpus, tmp_path):
    def name(**fields) -> str:
        data = DataConfig(**fields)
        return make_job(replace(recipe("tiny"), data=data), tmp_path / "runs").config.name

    first, same, other = (tmp_path / place for place in ("first", "same", "other"))
    text = {"train": (str(small_corpus),), "held_out_fraction": 0.1}
    prepare(DataConfig(**text), first)
    shutil.copytree(first, same)
    prepare(DataConfig(**(text | {"held_out_fraction": 0.2})), other)
    assert name(prepared=first) == name(prepared=same) != name(prepared=other)
    shutil.rmtree(same)
    shutil.copytree(other, same)
    assert name(prepared=same) == name(prepared=other)
    # Its sources may be named, as they were when it was made.
    config = replace(recipe("tiny"), data=DataConfig(train=(str(small_corpus),), prepared=first))
    assert resolve(make_job(config, tmp_path / "runs").config.data) == first

    for place in "ab":
        (tmp_path / place).mkdir()
    train_bpe(["some text, and some more"], 260, tmp_path / "a" / "tokenizer.json")
    shutil.copy(tmp_path / "a" / "tokenizer.json", tmp_path / "b" / "tokenizer.json")
    places = [str(tmp_path / place / "tokenizer.json") for place in "ab"]
    one, two = (name(**text, tokenizer=place) for place in places)
    assert one == two != name(**text)
    train_bpe(["some text, and some more"], 262, tmp_path / "b" / "tokenizer.json")
    assert one != name(**text, tokenizer=places[1])


def test_a_run_is_scored_again_only_if_a_task_is_new_or_another(small_corpus, tmp_path):
    runs, machine = real_runs(small_corpus, tmp_path)[3:4], Instead()
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    mine.write_text("a")
    theirs.write_text("b")
    wanted = {"parameters": ("replica",)}

    def scored(*tasks: Path) -> int:
        (row,) = rows_of(runs, tmp_path / "runs", machine, tasks=tasks, **wanted)
        assert {name for name in row if name.endswith("_acc")} == {f"{task.stem}_acc" for task in tasks}
        return len(machine.asked)

    assert [scored(), scored(mine), scored(mine), scored(), scored(theirs), scored(mine)] == [1, 2, 2, 2, 3, 3]
    wanted["parameters"] = ()
    mine.write_text("c")
    assert [scored(mine), scored(mine), scored(theirs)] == [4, 4, 4]
    # What another set of parameters had answered was an earlier question.
    wanted["parameters"] = ("replica",)
    assert scored(mine) == 5


def test_a_failure_takes_the_place_of_no_result(small_corpus, tmp_path):
    runs = real_runs(small_corpus, tmp_path)[:1]
    (row,) = rows_of(runs, tmp_path / "runs", Instead())
    (tmp_path / "mine.jsonl").write_text("a question")
    failing = Instead()
    failing.answer = {"failed": "not so", "is_final": True}
    (failed,) = rows_of(runs, tmp_path / "runs", failing, tasks=(tmp_path / "mine.jsonl",))
    assert failed["failed"] == "not so" and len(failing.asked) == 1
    assert rows_of(runs, tmp_path / "runs", failing) == [row] and len(failing.asked) == 1


def test_scores_of_questions_whose_digest_was_not_kept_are_taken_for_theirs(small_corpus, tmp_path):
    runs, machine, mine = real_runs(small_corpus, tmp_path)[:1], Instead(), tmp_path / "mine.jsonl"
    mine.write_text("a question")
    rows = rows_of(runs, tmp_path / "runs", machine, tasks=(mine,))
    path = make_job(runs[0].config, tmp_path / "runs").directory / "result.json"
    result = json.loads(path.read_text())
    del result["questions"]
    path.write_text(json.dumps(result))
    assert rows_of(runs, tmp_path / "runs", machine, tasks=(mine,)) == rows and len(machine.asked) == 1


def test_cosines_are_averaged_by_third_and_by_block(small_corpus, tmp_path):
    (row,) = rows_of(real_runs(small_corpus, tmp_path)[:1], tmp_path / "runs", Instead())
    assert row["cosine_first_third"] == pytest.approx(0.15) and row["cosine_middle_third"] == 0.5
    assert row["cosine_last_third"] == 0.9 and row["cosine_block_1"] == 0.5


def test_rows_come_back_as_they_were(tmp_path):
    rows = [{"M": 2, "loss": 1.25, "method": "diloco"}, {"M": 4, "failed": "no, it\ndid not"}]
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows
    with pytest.raises(ValueError, match="can't be read"):
        read_rows(tmp_path / "none.csv")


def start(corpus: Path, output: Path) -> subprocess.Popen:
    output.mkdir(exist_ok=True)
    command = [sys.executable, "-c", SCRIPT, str(corpus), str(output)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)


def results(output: Path) -> list[Path]:
    return sorted((output / "runs").glob("*/result.json"))


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory) -> Path:
    """The table of a grid that nothing happened to."""
    output = tmp_path_factory.mktemp("grids") / "undisturbed"
    assert start(small_corpus, output).wait(timeout=200) == 0
    return output / "grid.csv"


def test_a_killed_grid_goes_on_and_does_nothing_twice(small_corpus, tmp_path, undisturbed):
    output = tmp_path / "killed"
    process = start(small_corpus, output)
    deadline = time.monotonic() + 100
    while not results(output) or len(list((output / "runs").glob("*/metrics-0.jsonl"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in results(output)}
    assert 0 < len(done) < 4
    process = start(small_corpus, output)  # while what the first one started may still be at it
    assert process.wait(timeout=200) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert (output / "grid.csv").read_text() == undisturbed.read_text()
    low, same, other, two, wrong = read_rows(output / "grid.csv")
    assert low["eval_loss"] == same["eval_loss"] != other["eval_loss"]
    assert len({two[f"eval_loss{whose}"] for whose in ("", "_replica", "_average")}) == 3
    assert "layers_per_fragment=7 is more than the model's 2 blocks" in wrong["failed"]


@pytest.mark.filterwarnings("default")  # of ray
def test_a_ray_cluster_gives_the_same_rows(small_corpus, tmp_path, undisturbed):
    ray = pytest.importorskip("ray")
    from diloco.experiments.runner.cluster import RayCluster

    with pytest.raises(ValueError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        RayCluster("127.0.0.1:1")
    runs = [run for run in real_runs(small_corpus, tmp_path) if run.labels["rate"] in ("low", "wrong")]
    here = [row for row in read_rows(undisturbed) if row["rate"] in ("low", "wrong")]
    cluster = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        there = rows_of(runs, tmp_path / "there", RayCluster(cluster.address_info["gcs_address"]))
    finally:
        ray.shutdown()
    assert there == here


def test_a_failure_that_may_pass_is_tried_again(small_corpus, tmp_path, monkeypatch):
    runs = real_runs(small_corpus, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        (row,) = rows_of(runs[:1], tmp_path / "runs", LocalMachine())
    assert "the run's process ended with exit code 1: see" in row["failed"]
    missing = tmp_path / "piqa.jsonl"
    (row,) = rows_of(runs[:1], tmp_path / "runs", LocalMachine(), tasks=(missing,))
    assert "piqa.jsonl can't be read" in row["failed"]
    (row,) = rows_of(runs[:1], tmp_path / "runs", Instead())
    assert "failed" not in row
    # But not one that would fail again.
    rows_of(runs[-1:], tmp_path / "runs", LocalMachine())
    again = Instead()
    assert "layers_per_fragment=7" in rows_of(runs[-1:], tmp_path / "runs", again)[0]["failed"]
    assert not again.asked


def test_a_damaged_checkpoint_is_a_failure_that_may_pass(small_corpus, tmp_path, monkeypatch):
    """It says what to delete; the checkpoint before it is good."""

    def damaged(*_, **__):
        raise CheckpointError("delete it")

    monkeypatch.setattr("diloco.training.loop.train", damaged)
    with pytest.raises(OSError, match="delete it") as caught:
        one_job._train(config(small_corpus, tmp_path), resume=True)
    assert exit_code_of(caught.value) == FAILURE


def test_a_machine_runs_as_many_at_once_as_it_has_cores(small_corpus, tmp_path, monkeypatch):
    one = make_job(config(small_corpus, tmp_path), tmp_path)
    two = make_job(config(small_corpus, tmp_path, num_replicas=2), tmp_path)
    busy, most, lock = 0, 0, threading.Lock()

    def run(job):
        nonlocal busy, most
        with lock:
            busy += job.config.num_processes
            most = max(most, busy)
        time.sleep(0.05)
        with lock:
            busy -= job.config.num_processes
        return {}

    monkeypatch.setattr(grid, "run_job", run)
    machine = LocalMachine(3)
    for future in [machine.submit(job) for job in (two, one, two, one, one, two)]:
        future.result(timeout=20)
    assert most == 3
    with pytest.raises(ValueError, match="--cores must be at least 1, not 0"):
        LocalMachine(0)


def test_a_closed_machine_begins_nothing(small_corpus, tmp_path, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    asked = []

    def run(job):
        asked.append(job)
        begun.set()
        assert may_end.wait(20)
        return {}

    monkeypatch.setattr(grid, "run_job", run)
    two = make_job(config(small_corpus, tmp_path, num_replicas=2), tmp_path)
    machine = LocalMachine(2)
    first, second = machine.submit(two), machine.submit(two)
    assert begun.wait(20)
    machine.close()
    may_end.set()
    assert first.result(timeout=20) == {}
    with pytest.raises(CancelledError):
        second.result(timeout=20)
    assert asked == [two]
