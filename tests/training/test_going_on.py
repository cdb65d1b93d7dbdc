"""Runs that were killed, and go on: with the same bits, or with a sentence that says why not."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.training.runs import (
    BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT,
    DILOCO,
    TIMEOUT_SECONDS,
    call,
    command,
    lines,
    run,
    summary,
    trained,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-tokens", "61440", *BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT],
        ["--num-tokens", "30720", "--method", "data_parallel"],
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(folder, streaming, flags):
    method = flags[-1]
    flags = [*flags, "--checkpoint.every-steps", "20"]
    whole = trained(folder, f"whole-{method}", *flags) if method == "data_parallel" else streaming
    killed = folder / "runs" / f"killed-{method}"
    with subprocess.Popen(
        command("--name", killed.name, *flags),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
    ) as process:
        victim = wait_for_step(process, killed, step=45)
        os.kill(victim, signal.SIGKILL)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert re.fullmatch(
        rf"diloco: replica \d was killed by SIGKILL .*; go on with: .* --resume runs/{killed.name}\n", told
    )
    assert len(lines(killed, 0)) < len(lines(whole, 0))

    again = run(folder, "--resume", str(killed))
    assert again.returncode == 0, again.stderr
    for replica in (0, 1):
        assert_equal(final_state(whole, replica), final_state(killed, replica))
        assert [line["loss"] for line in lines(whole, replica)] == [
            line["loss"] for line in lines(killed, replica)
        ]
    same = ("outer_hash", "eval_loss", "bytes_sent_per_replica")
    assert [summary(whole)[name] for name in same] == [summary(killed)[name] for name in same]


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> int:
    """The process of the last replica, once replica 0 has come that far."""
    path = run / "metrics-0.jsonl"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists() or path.read_text().count("\n") < step:
        assert time.monotonic() < deadline and process.poll() is None, "the run came to nothing"
        time.sleep(0.02)
    return max(replicas(process.pid))


def replicas(launcher: int) -> list[int]:
    """The forks of its children."""
    return [replica for ancestor in children(launcher) for replica in children(ancestor)]


def children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def final_state(run: Path, replica: int) -> dict:
    newest = max((run / "checkpoints" / f"replica-{replica}").glob("step-*/"))
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(newest, file.name)
        tensors = torch.load(file.name, weights_only=True)
    facts = json.loads((newest / "facts.json").read_text())
    del facts["seconds"], facts["blocked_seconds"], facts["sync"]["blocked_seconds"]
    return facts | {"tensors": tensors}


def assert_equal(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


def test_replicas_end_with_their_launcher(folder):
    with subprocess.Popen(
        command("--name", "abandoned", "--num-tokens", "512000"), cwd=folder, text=True, stdout=subprocess.DEVNULL
    ) as process:
        wait_for_step(process, folder / "runs" / "abandoned", step=1)
        abandoned = replicas(process.pid)
        process.kill()
    assert len(abandoned) == 2
    deadline = time.monotonic() + 20
    while any(is_alive(replica) for replica in abandoned):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Neither gone nor waiting for its parent to hear of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_goes_on_with_another_number_of_shards(folder, streaming):
    """From step 80 on, with fragments in flight, and again after a shard was killed.

    Blocks of the wire then begin anew in each shard.
    """
    resharded = folder / "runs" / "resharded"
    shutil.copytree(streaming, resharded)
    (resharded / "summary.json").unlink()
    for path in (resharded / "checkpoints").glob("*/step-*.sha256"):
        if int(path.name[5:13]) > 80:
            path.unlink()
    metrics = resharded / "metrics-0.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:80]))
    with subprocess.Popen(
        command("--resume", str(resharded), "--shards-per-replica", "2"),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
    ) as process:
        os.kill(wait_for_step(process, resharded, step=85), signal.SIGKILL)
        told = process.communicate(timeout=60)[1]
    assert re.fullmatch(r"diloco: replica \d, shard \d, was killed by SIGKILL .*\n", told)
    process = run(folder, "--resume", str(resharded), "--shards-per-replica", "2")
    assert process.returncode == 0 and not process.stderr, process.stderr
    found, expected = summary(resharded), summary(streaming)
    assert found["shards_per_replica"] == 2 and expected["shards_per_replica"] == 1
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=0.005)
    assert found["outer_hash"] != expected["outer_hash"]
    assert found["bytes_sent_per_replica"] > expected["bytes_sent_per_replica"]
    for replica in (0, 1):
        assert [line["step"] for line in lines(resharded, replica)] == list(range(1, 121))
        mine, theirs = ([line["loss"] for line in lines(run, replica)] for run in (resharded, streaming))
        assert mine[:80] == theirs[:80]
        assert mine[80:] == pytest.approx(theirs[80:], rel=0.02)


def test_a_run_killed_before_its_first_checkpoint_was_everywhere_starts_over(folder, streaming):
    """One replica had saved the first step, the other was still writing it: the initial state is in common."""
    early = folder / "runs" / "early"
    shutil.copytree(streaming, early)
    for replica, kept in ((0, 80), (1, 0)):
        for path in (early / "checkpoints" / f"replica-{replica}").glob("*.sha256"):
            if int(path.name[5:13]) != kept:
                path.unlink()
    again = run(folder, "--resume", str(early))
    assert again.returncode == 0 and "no step was saved by every replica: starting over" in again.stdout
    assert [line["step"] for line in lines(early, 1)] == list(range(1, 121))
    assert summary(early)["outer_hash"] == summary(streaming)["outer_hash"]


def test_a_resume_without_a_step_in_common_is_refused(folder, streaming):
    lost = folder / "runs" / "lost"
    shutil.copytree(streaming, lost)
    shutil.rmtree(lost / "checkpoints" / "replica-1")
    process = run(folder, "--resume", str(lost))
    assert process.returncode == 2
    assert re.search(r"no step is held by every replica \(they hold \[80, 100, 120\], \[\]\)", process.stderr)
    assert "runs/lost/checkpoints to start over" in process.stderr
    assert len(list((lost / "checkpoints" / "replica-0").glob("*.sha256"))) == 3, "nothing is deleted"


def test_a_resume_on_other_text_is_refused(folder, streaming):
    other = folder / "other"
    other.mkdir()
    rows = (folder / "text.jsonl").read_text().replace("rain", "snow")
    (other / "text.jsonl").write_text(rows)
    prepare = [
        *DILOCO,
        "data",
        "prepare",
        "--output",
        "prepared",
        "--train",
        "text.jsonl",
        "--held-out-fraction",
        "0.1",
    ]
    assert call(prepare, other).returncode == 0
    process = run(folder, "--resume", str(streaming), "--data.prepared", "other/prepared")
    assert process.returncode == 2
    assert re.search(
        r"started on data with digest \w+ and [\d,]+ tokens .*other/prepared has \w+ and [\d,]+:",
        process.stderr,
    )


def test_a_damaged_checkpoint_ends_the_resume_with_the_way_out(folder, streaming):
    newest = max((streaming / "checkpoints" / "replica-1").glob("*/*.distcp"))
    content = newest.read_bytes()
    newest.write_bytes(content[:-100])
    try:
        process = run(folder, "--resume", "runs/streaming")
    finally:
        newest.write_bytes(content)
    assert process.returncode == 2
    assert re.search(r"step-00000120/__0_0.distcp is damaged .* to resume from step 100", process.stderr)
    assert process.stderr.count("\n") == 1
