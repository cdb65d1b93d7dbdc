"""Text is prepared by several processes, with the bytes that one of them makes."""

import gzip
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import zstandard
from tests.data.corpora import as_parquet, write_rows
from tests.data.test_interruptions import content, finished_files, kill_when

from diloco.data import encoding, readers
from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.errors import UserError

TEXTS = [f"document {i} of several words: né漢\n" * (i % 9) for i in range(400)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Sources of every format, in many pieces, since these are small."""
    monkeypatch.setattr(readers, "PIECE_BYTES", 2000)
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    write_rows(folder / "a.jsonl", TEXTS[:100], "a")
    lines = Path(write_rows(tmp_path / "b.jsonl", TEXTS[100:200], "b")).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "b2.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "c.parquet").write_bytes(as_parquet({"text": TEXTS[200:300]}, row_group_size=30))
    (folder / "d.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS[301:350]))
    for number, text in enumerate(TEXTS[350:]):
        (folder / f"more/{number}.txt").write_text(text)
    held_out = write_rows(tmp_path / "held_out.jsonl", TEXTS[:50], "h")
    return DataConfig(train=(str(folder),), held_out=(held_out,), tokenizer="bpe:300")


@pytest.mark.parametrize(
    "change",
    [
        {"max_train_bytes": 42_000},
        pytest.param(
            {
                "train": ("texts/a.jsonl", "texts/c.parquet"),
                "weights": (0.7, 0.3),
                "held_out": (),
                "held_out_fraction": 0.2,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_bytes_are_the_same_for_any_number_of_processes(config, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, three = (
        content(prepare(replace(config, workers=workers, **change), tmp_path / f"of{workers}", shard_tokens=1500))
        for workers in (1, 3)
    )
    assert one == three and sum(name.endswith(".bin") for name in one) >= 4


PROGRAM = """
import sys
from pathlib import Path
from diloco.data import readers
from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
readers.PIECE_BYTES = 2000
texts, held_out, weights, output = sys.argv[1:]
sys.path.append(output)  # which stands in the command lines of its processes, too
config = DataConfig(
    train=tuple(texts.split()), held_out=(held_out,), tokenizer="bpe:300", workers=3,
    weights=tuple(map(float, weights.split())),
)
prepare(config, Path(output), shard_tokens=300)
"""


@pytest.mark.slow
def test_three_processes_that_are_killed_go_on_to_the_same_bytes(config, tmp_path):
    train, weights = (f"{tmp_path}/texts/a.jsonl", f"{tmp_path}/texts/c.parquet"), (0.7, 0.3)
    config = replace(config, train=train, weights=weights, workers=1)
    whole = content(prepare(config, tmp_path / "whole", shard_tokens=300))
    directory = tmp_path / "killed"
    for landmark in ("settings.json", "train-00005.bin", "train-00009.json"):
        arguments = (" ".join(train), config.held_out[0], " ".join(map(str, weights)), str(directory))
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])
        kill_when(process, directory / landmark)
        assert not (directory / "index.json").exists()
        deadline = time.monotonic() + 30
        while str(directory) in running():  # its processes end by themselves
            assert time.monotonic() < deadline
            time.sleep(0.05)
    kept = finished_files(directory)
    (directory / "train-00099.bin.0a1b2c3d.partial").touch()  # as a kill may leave one
    (directory / "somebody.else's.partial").touch()
    assert prepare(config, directory, shard_tokens=300) == directory
    (directory / "somebody.else's.partial").unlink()
    assert content(directory) == whole and len(kept) >= 11
    assert {path: finished_files(directory)[path] for path in kept} == kept


def running() -> str:
    """The command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_a_process_that_is_killed_is_said(config, tmp_path, monkeypatch):
    started = subprocess.Popen

    def killed(*arguments, **options):
        process = started(*arguments, **options)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(encoding.subprocess, "Popen", killed)
    with pytest.raises(UserError, match=r"was killed \(out of memory\?\): take fewer by data\.workers") as error:
        prepare(replace(config, workers=2), tmp_path / "out")
    assert error.value.fields == ("data.workers",)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_that_is_stopped_is_waited_for_within_bounds(is_late, config, tmp_path, monkeypatch):
    """Also one that is started only after the wait for it has ended."""
    started, waited, is_over, pids = subprocess.Popen, encoding.wait, threading.Event(), []

    def stopped(*arguments, **options):
        assert not is_late or is_over.wait(30)
        process = started(*arguments, **options)
        os.kill(process.pid, signal.SIGSTOP)
        pids.append(process.pid)
        return process

    def wait(answers, seconds):
        while not (pids or is_late):
            time.sleep(0.01)
        return waited(answers, seconds)

    def shutdown(self, **options):
        is_over.set()
        ThreadPoolExecutor.shutdown(self, **options)

    late = type("Late", (ThreadPoolExecutor,), {"shutdown": shutdown})
    monkeypatch.setattr(encoding, "ThreadPoolExecutor", late)
    monkeypatch.setattr(encoding, "wait", wait)
    monkeypatch.setattr(encoding.subprocess, "Popen", stopped)
    monkeypatch.setattr(encoding, "SECONDS_OF_A_PIECE", 0.5)
    with pytest.raises(UserError, match=rf"tokenizes a part of {config.train[0]}, gave no answer within") as error:
        prepare(replace(config, workers=1), tmp_path / "out")
    assert str(error.value).startswith("the process, " if is_late else f"process {pids[0]}, ")


def test_a_message_that_is_cut_short_ends_either_side_as_a_closed_pipe_does(config, tmp_path, monkeypatch):
    ours, theirs = Pipe()
    with ours, theirs, socket.socket(fileno=os.dup(theirs.fileno())) as end:
        end.send(b"\0\0\0\x64the first of 100 bytes")
        end.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(encoding.Encoders, "_connection", lambda *_: ours)
        with pytest.raises(UserError, match="was killed"):
            prepare(replace(config, workers=1), tmp_path / "out")
    ours, theirs = Pipe()
    with theirs:
        os.write(ours.fileno(), b"\0\0\0\x64the first of 100 bytes")
        ours.close()
        encoding.serve(os.dup(theirs.fileno()))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_lies_behind_the_limit_is_not_refused_and_what_lies_before_is(config, workers, tmp_path):
    with (tmp_path / "texts/a.jsonl").open("a") as file:
        file.write("no JSON\n")
    config = replace(config, train=(f"{tmp_path}/texts/a.jsonl",), workers=workers)
    prepare(replace(config, max_train_bytes=10_000), tmp_path / "before")
    with pytest.raises(UserError, match=r"a\.jsonl can't be read: line 101 is not JSON"):
        prepare(config, tmp_path / "behind")
