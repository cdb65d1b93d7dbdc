"""The command line, on real processes and real files."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from diloco.cli import main
from diloco.models.decoder import Decoder
from diloco.training.run_directory import read_config

TIMEOUT_SECONDS = 200
DILOCO = [sys.executable, "-m", "diloco"]

BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT = ["--diloco.overlap-steps", "2", "7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where runs are made, with a small corpus of English-like sentences."""
    folder = tmp_path_factory.mktemp("runs")
    subjects, verbs, objects = (
        ("the cat", "a ship", "my aunt"),
        ("sees", "carries", "forgets"),
        ("rain", "salt", "him"),
    )
    sentences = [f"{s} {v} {o}, {i}." for i in range(40) for s in subjects for v in verbs for o in objects]
    rows = [{"id": str(i), "text": " ".join(sentences[i : i + 30])} for i in range(0, len(sentences), 10)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(*flags: str) -> list[str]:
    text = ["--data.train", "text.jsonl", "--data.held-out-fraction", "0.1"]
    return [*DILOCO, "train", "tiny", *([] if "--resume" in flags else text), *flags]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return call(command(*flags), folder)


def call(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; if it takes too long, end it with all its children."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def trained(folder: Path, name: str, *flags: str) -> Path:
    """A run that went well."""
    process = run(folder, "--name", name, *flags)
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr, process.stderr
    return folder / "runs" / name


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def lines(run: Path, replica: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"metrics-{replica}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def streaming(folder) -> Path:
    flags = ("--num-tokens", "61440", "--log-layer-cosine", "--evaluation.every-steps", "60")
    return trained(folder, "streaming", *flags, *BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT)


def test_a_run_leaves_its_files(streaming):
    assert {path.name for path in streaming.iterdir()} == {
        "checkpoints",
        "config.json",
        "data.json",
        "metrics-0.jsonl",
        "metrics-1.jsonl",
        "outer.safetensors",
        "summary.json",
        "tensorboard",
    }
    assert read_config(streaming).diloco.overlap_steps == (2, 7)


def test_the_model_learns(streaming):
    losses = [line["loss"] for line in lines(streaming, 0)]
    assert losses[0] > 5 and losses[-1] < 3
    assert 0 < summary(streaming)["eval_loss"] < losses[20]


def test_the_books_of_bytes_agree(streaming):
    config, total = read_config(streaming), summary(streaming)
    model = Decoder(config.model, seed=0)
    num_params = sum(p.numel() for p in model.parameters())
    by_fragment = {0: 0, 1: 0, 2: 0}
    for name, parameter in model.named_parameters():
        block = name.split(".")[1] if name.startswith("blocks") else None
        by_fragment[2 if block is None else int(block) % 2] += parameter.numel()
    payload = {p: 16 + -(-size // 256) + -(-size // 2) for p, size in by_fragment.items()}
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
                assert set(outer_step["layer_cosine"]) == blocks[outer_step["fragment"]]
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
    blocked, seconds = (
        sum(line[name] for line in lines(streaming, 0)) for name in ("blocked_seconds", "step_seconds")
    )
    assert total["wall_seconds"] == pytest.approx(seconds)
    assert total["compute_utilization"] == pytest.approx(1 - blocked / seconds)
    assert blocked > 0


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
    return max(pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


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


def test_data_parallel_is_one_replica_with_the_whole_batch(folder):
    flags = ("--method", "data_parallel", "--precision", "fp32", "--micro-batch", "2")
    losses = {}
    for num_replicas in (1, 2):
        path = trained(folder, f"dp-{num_replicas}", *flags, "--num-replicas", str(num_replicas))
        by_replica = [[line["loss"] for line in lines(path, m)] for m in range(num_replicas)]
        losses[num_replicas] = torch.tensor(by_replica).mean(0)
    torch.testing.assert_close(losses[1], losses[2], rtol=1e-3, atol=1e-3)


def test_a_replica_alone_has_nobody_to_wait_for(folder):
    alone = summary(trained(folder, "alone", "--num-replicas", "1"))
    assert alone["bytes_sent_per_replica"] == alone["data_parallel_bytes_per_replica"] == 0
    assert alone["compute_utilization"] > 0.99


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(folder, streaming):
    prepared = read_config(streaming).data.prepared
    process = call(
        [*DILOCO, "train", "tiny", "--data.prepared", str(prepared), "--data.tokenizer", "bpe:300"], folder
    )
    assert process.returncode == 2
    assert re.fullmatch(r"diloco: tokenizer='bpe:300' contradicts .*tokenizer='bytes'.*\n", process.stderr)


def test_torchrun_joins_the_replicas(folder, streaming):
    """Under torchrun the run ends with the same bits as under our own launcher."""
    flags = ["--num-tokens", "61440", *BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = call([*torchrun, "-m", *command("--name", "torchrun", *flags)[2:]], folder, OMP_NUM_THREADS="1")
    assert process.returncode == 0, process.stderr
    assert summary(folder / "runs" / "torchrun")["outer_hash"] == summary(streaming)["outer_hash"]


def test_two_machines_with_their_own_disks_train_together_and_resume(folder, streaming):
    """Two launchers, each with one replica and a directory of its own; then again with the disks swapped."""
    machines = [folder / f"machine-{m}" for m in (0, 1)]
    for machine in machines:
        machine.mkdir()
        shutil.copy(folder / "text.jsonl", machine)
    flags = ["--num-tokens", "61440", *BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT]
    for process in on_two_machines(machines, "--name", "far", *flags):
        assert process.returncode == 0, process.stderr
    assert summary(machines[0] / "runs" / "far")["outer_hash"] == summary(streaming)["outer_hash"]
    assert not (machines[1] / "runs" / "far" / "summary.json").exists()
    mine, theirs = (read_config(machine / "runs" / "far") for machine in machines)
    assert replace(mine, runs=theirs.runs, data=theirs.data) == theirs

    swapped = on_two_machines(machines[::-1], "--resume", "runs/far", "--timeout-seconds", "20")
    assert all(process.returncode != 0 for process in swapped)
    assert any("start each machine with the --node-rank it had" in process.stderr for process in swapped)


def on_two_machines(machines: list[Path], *flags: str) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]

    def torchrun(rank: int) -> subprocess.CompletedProcess[str]:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            *address,
        ]
        arguments = ["--node-rank", str(rank), "-m", *command(*flags)[2:]]
        return call([*launcher, *arguments], machines[rank], OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(torchrun, (0, 1)))


MISTAKES = {
    "overlap": (
        ["--diloco.overlap-steps", "10"],
        "overlap_steps must be at least 0 and below sync_every=10, not 10",
    ),
    "mixing": (["--diloco.mixing", "1.5"], "mixing must lie between 0 and 1, not 1.5"),
    "period": (["--diloco.sync-every", "0"], "sync_every must be at least 1 step, not 0"),
    "wire": (
        ["--diloco.wire", "e9m9"],
        "'e9m9' is not a wire format: choose one of fp32, bf16, fp16, e4m3",
    ),
    "batch": (["--num-replicas", "3"], "global_batch=8 must be a multiple of num_replicas=3"),
    "missing file": (["--data.train", "nowhere.txt"], "'nowhere.txt' matches no file"),
    "empty corpus": (["--data.train", "empty.txt"], "empty.txt"),
    "tokenizer": (["--model.vocab-size", "100"], "vocab_size=100 is smaller than the tokenizer's 257"),
    "no run": (["--resume", "runs/nothing"], "runs/nothing holds no run"),
    "a run twice": (["--name", "streaming"], "already holds a run: choose another --name"),
    "another run": (["--resume", "runs/streaming", "--seed", "9"], "started with seed=0, and now 9 is asked for"),
    "the recipe's own": (
        ["--resume", "runs/streaming", "--num-tokens", "30720"],
        "num_tokens=61440, and now 30720",
    ),
    "never sent": (["--diloco.sync-every", "58"], "fragment 2 is first sent at step 96, and the run has 60"),
    "another recipe": (["--resume", "runs/streaming", "--data.tokenizer", "bpe:500"], "data.tokenizer=bytes"),
    "no whole gradient": (
        ["--diloco.combine", "reduce_scatter", "--log-layer-cosine"],
        "log_layer_cosine means nothing to diloco.combine=reduce_scatter",
    ),
    "one fragment": (["--method", "diloco", "--diloco.layers-per-fragment", "1"], "nothing to one whole fragment"),
    "no outer step": (["--method", "data_parallel", "--diloco.mixing", "1"], "diloco.mixing means nothing to"),
    "long sequences": (["--sequence-length", "1048576", "--num-tokens", "134217728"], "fewer than the 1048577"),
}


@pytest.mark.parametrize(("flags", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_one_sentence(folder, streaming, flags, sentence, monkeypatch, capsys):
    (folder / "empty.txt").touch()
    before = sorted(folder.glob("runs/*"))
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="2"):
        main(command(*flags)[3:])
    told = capsys.readouterr().err
    assert told.startswith("diloco: ") and told.count("\n") == 1
    assert sentence in told
    assert sorted(folder.glob("runs/*")) == before


def test_a_run_that_was_never_begun_is_not_to_be_resumed(folder):
    process = run(folder, "--runs", "/proc/nope")
    assert process.returncode == 1 and process.stderr.count("\n") == 1
    assert "No such file or directory" in process.stderr and "--resume" not in process.stderr


def test_an_unknown_flag_is_named(folder):
    process = run(folder, "--learning-rat", "1")
    assert process.returncode == 2 and "--learning-rat" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_loss_that_is_not_finite_ends_the_run(folder):
    process = run(folder, "--name", "diverged", "--optimizer.learning-rate", "1e12")
    assert process.returncode == 2
    assert re.fullmatch(
        r"diloco: step \d+: the loss of replica \d is .* lower --optimizer.learning-rate .*\n", process.stderr
    )


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
