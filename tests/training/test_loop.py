"""Whole runs: of the command line, on real processes and real files."""

import re
import shutil
import time
from dataclasses import replace
from operator import truediv
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ports import free_port
from tests.processes import program
from tests.training.cases import rate
from tests.training.runs import (
    DILOCO,
    TIMEOUT_SECONDS,
    command,
    complaints,
    lines,
    run,
    summary,
)

from diloco.cli.main import main
from diloco.errors import ExchangeError
from diloco.training.config.config import CheckpointConfig, EvaluationConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.loop import BegunStep, begin_step, train
from diloco.training.prepare import prepare_run
from diloco.training.records.metrics import StepMetrics
from diloco.training.records.runs import read_config
from diloco.training.state import TrainState


def test_a_run_leaves_its_files(streaming):
    assert {path.name for path in streaming.iterdir()} == {
        "checkpoints",
        "config.json",
        "data.json",
        "metrics-0.jsonl",
        "metrics-1.jsonl",
        "outer.safetensors",
        "running",
        "samples.json",
        "summary.json",
        "tensorboard",
    }
    assert read_config(streaming).diloco.overlap_steps == (2, 7)


def test_the_model_learns(streaming):
    losses, rates = ([line[name] for line in lines(streaming, 0)] for name in ("loss", "learning_rate"))
    assert rates == [rate(read_config(streaming), step) for step in range(1, 121)], "of its own tokens"
    assert losses[0] > 5 and losses[-1] < 3
    assert 0 < summary(streaming)["eval_loss"] < losses[20]


def test_the_books_of_bytes_agree(streaming):
    config, total = read_config(streaming), summary(streaming)
    model = config.model.build(seed=0)
    num_params = sum(p.numel() for p in model.parameters())
    by_fragment = {0: 0, 1: 0, 2: 0}
    for name, parameter in model.named_parameters():
        block = name.split(".")[1] if name.startswith("blocks") else None
        by_fragment[2 if block is None else int(block) % 2] += parameter.numel()
    payload = {p: 32 + -(-size // 256) + -(-size // 2) for p, size in by_fragment.items()}
    sends = {p: len([t for t in range(10, 121) if (t - p * 10 // 3) % 10 == 0]) for p in payload}
    expected = sum(payload[p] * sends[p] for p in payload)
    assert total["bytes_sent_per_replica"] == expected
    for replica in (0, 1):
        for name in ("bytes_sent", "bytes_received"):
            assert sum(line[name] for line in lines(streaming, replica)) == expected
    assert total["data_parallel_bytes_per_replica"] == num_params * 4 * 120
    assert total["num_params"] == num_params


def test_each_outer_step_is_written_down(streaming):
    for replica, overlap in ((0, 2), (1, 7)):
        for line in lines(streaming, replica):
            for outer_step in line.get("outer_steps", []):
                # After the last step what is in flight is merged at once.
                assert outer_step["sent_step"] == line["step"] - overlap or line["step"] == 120
                assert outer_step["outer_gradient_norm"] > 0
                assert -1 <= outer_step["cosine"] <= 1
                blocks = {0: {"blocks.0", "blocks.2"}, 1: {"blocks.1", "blocks.3"}, 2: set()}
                assert set(outer_step.get("layer_cosine", ())) == blocks[outer_step["fragment"]]
    norms = [
        {
            (o["fragment"], o["round"]): o["outer_gradient_norm"]
            for line in lines(streaming, m)
            for o in line.get("outer_steps", [])
        }
        for m in (0, 1)
    ]
    assert norms[0] == norms[1] and len(norms[0]) == 34


def test_replicas_read_different_text_and_share_the_evaluation(streaming):
    mine, theirs = lines(streaming, 0), lines(streaming, 1)
    assert mine[0]["loss"] != theirs[0]["loss"], "of the same parameters"
    evaluated = [line["step"] for line in mine if "eval_loss" in line]
    assert evaluated == [line["step"] for line in theirs if "eval_loss" in line] == [60, 120]


def test_the_time_adds_up(streaming):
    total = summary(streaming)
    seconds, blocked = (
        [sum(line[name] for line in lines(streaming, replica)) for replica in (0, 1)]
        for name in ("step_seconds", "blocked_seconds")
    )
    assert total["wall_seconds"] == pytest.approx(seconds[0])
    assert total["compute_utilization"] == pytest.approx(1 - sum(map(truediv, blocked, seconds)) / 2)
    assert sum(blocked) > 0


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(folder, short):
    """Resume at step 20, with fragments in flight; blocks of the wire begin anew in each shard."""
    resharded = folder / "runs" / "resharded"
    shutil.copytree(short, resharded)
    (resharded / "summary.json").unlink()
    for path in (resharded / "checkpoints").glob("*/step-00000030.sha256"):
        path.unlink()
    process = run(folder, "--resume", str(resharded), "--shards-per-replica", "2")
    assert process.returncode == 0 and not complaints(process), process.stderr
    after, before = summary(resharded), summary(short)
    assert after["shards_per_replica"] == 2 and before["shards_per_replica"] == 1
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=0.005)
    assert after["outer_hash"] != before["outer_hash"]
    assert after["bytes_sent_per_replica"] > before["bytes_sent_per_replica"], "more scales"
    for replica in (0, 1):
        assert [line["step"] for line in lines(resharded, replica)] == list(range(1, 31))
        mine, theirs = ([line["loss"] for line in lines(path, replica)] for path in (resharded, short))
        assert mine[:20] == theirs[:20]
        assert mine[20:] == pytest.approx(theirs[20:], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_replica_alone_has_nobody_to_wait_for(folder, monkeypatch, steps_ahead):
    """One step ahead, as on a GPU, the host sees the same steps in the same order."""
    monkeypatch.setattr("diloco.training.loop._Run.steps_ahead", steps_ahead)
    monkeypatch.setattr("diloco.training.records.samples._SECONDS", 600.0)  # a busy machine writes slowly
    unresolved = replace(recipe("tiny"), name=f"alone-{steps_ahead}", runs=folder / "runs", num_replicas=1)
    evaluation, checkpoint = EvaluationConfig(every_steps=6, num_tokens=512), CheckpointConfig(every_steps=8)
    unresolved = replace(unresolved, num_tokens=24 * 8 * 64, evaluation=evaluation, checkpoint=checkpoint)
    data = replace(
        unresolved.data, train=(str(folder / "text.jsonl"),), held_out_fraction=0.1, cache=folder / "data"
    )
    config = resolved(prepare_run(replace(unresolved, data=data)))
    curves: dict[int, dict] = {}
    recording = SimpleNamespace(log=lambda values, step: curves.update({step: values}), close=lambda: None)
    monkeypatch.setattr("diloco.training.loop.tracker", lambda name, **_: recording)
    steps: list[int] = []
    ended_before: dict[int, int] = {}

    def begin(state: TrainState, *arguments: Any, **values: Any) -> BegunStep:
        ended_before[state.step + 1] = len(steps) - 1
        return begin_step(state, *arguments, **values)

    def on_step(metrics: StepMetrics) -> None:
        steps.append(metrics.step)

    monkeypatch.setattr("diloco.training.loop.begin_step", begin)
    outcome = train(config, on_start=lambda step, _: steps.append(step), on_step=on_step)
    assert steps == list(range(25)) and outcome is not None
    # Before a step that is evaluated or saved begins, all others have ended; after it, none is left.
    whole = {step + more for step in (0, 6, 8, 12, 16, 18, 24) for more in (0, 1)}
    expected = {step: step - 1 if step in whole else step - 1 - steps_ahead for step in range(1, 25)}
    assert ended_before == expected
    assert outcome.summary["bytes_sent_per_replica"] == outcome.summary["data_parallel_bytes_per_replica"] == 0
    assert outcome.summary["compute_utilization"] > 0.9, "but for pauses of a busy machine"
    assert outcome.summary["tokens_per_second"] == pytest.approx(24 * 8 * 64 / outcome.summary["wall_seconds"])
    assert [len(sample.text) > 50 for sample in outcome.samples] == [True] * 3
    written = lines(folder / "runs" / f"alone-{steps_ahead}", 0)
    assert sum(line["step_seconds"] for line in written) == pytest.approx(outcome.summary["wall_seconds"])
    for line in written:
        assert curves[line["step"]]["tokens_per_second"] == pytest.approx(8 * 64 / line["step_seconds"])


@pytest.mark.slow
def test_a_machine_alone_says_at_once_whom_it_waits_for(folder, tmp_path):
    port, begin = free_port(), time.monotonic()
    shutil.copy(folder / "text.jsonl", tmp_path)
    place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    arguments = command("--name", "alone", "--timeout-seconds", "4")[len(DILOCO) :]
    with program(main, arguments, folder=tmp_path, MASTER_PORT=str(port), **place) as started:
        line = started.wait_for_lines(1)[0]
        assert time.monotonic() - begin < 3
        where = f"127.0.0.1, port {port}"
        assert line == f"start replica 1 of 2, which meets replica 0 at {where}, for up to 4 s"
        ended = started.wait(TIMEOUT_SECONDS)
    assert re.search(rf"^waiting for replica 0 at {where}, up to \d s more …$", ended.stderr, re.MULTILINE), (
        ended.stderr
    )
    assert "did not arrive" in ended.stderr and ended.returncode == ExchangeError.exit_code


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_with_the_flag_that_helps(folder):
    process = run(folder, "--name", "diverged", "--optimizer.learning-rate", "1e12")
    assert process.returncode == 2
    assert re.fullmatch(
        r"diloco: step \d+: the loss of replica \d is .* lower --optimizer.learning-rate .*\n", process.stderr
    )
