"""The command line, on real processes and real files."""

import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.runs import (
    BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT,
    DILOCO,
    call,
    command,
    lines,
    run,
    summary,
    trained,
)

from diloco.cli.main import main
from diloco.models.decoder import Decoder
from diloco.training.runs import read_config


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
        "must be at least 0 and below",
    ),
    "mixing": (["--diloco.mixing", "1.5"], "mixing must lie between 0 and 1, not 1.5"),
    "period": (["--diloco.sync-every", "0"], "=0 must be at least 1"),
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
    "long sequences": (["--sequence-length", "1048576", "--num-tokens", "134217728"], " takes 1048577: add text"),
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
