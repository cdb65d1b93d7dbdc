"""`prepare` is interrupted, in real processes and at every rename, and called again."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from diloco.data import readers
from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.tokenizers import ByteTokenizer

PROGRAM = """
import sys, time
from pathlib import Path
from diloco.data import prepare, readers
from diloco.data.config import DataConfig
source, directory = sys.argv[1:]
readers.PIECE_BYTES = 2**16
wait = lambda _: time.sleep(0.02)
prepare.prepare(DataConfig(train=(source,)), Path(directory), shard_tokens=2**16, progress=wait)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "modules.jsonl"
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    rows = [{"id": module.name, "text": module.read_text(encoding="utf-8")} for module in modules]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def kill_when(process, path):
    """Kill -9 as soon as `path` exists; returns once the process is gone."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def finished_files(directory):
    """The tokenizer and all finished shards, each with what a rewrite would change."""
    files = [path for path in directory.glob("*.bin") if path.with_suffix(".json").exists()]
    files += directory.glob("tokenizer.json")
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def test_two_processes_that_ask_at_a_time_do_it_once(tmp_path, source):
    command = [sys.executable, "-c", PROGRAM, source, str(tmp_path / "both")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    prepare(DataConfig(train=(source,)), tmp_path / "one", shard_tokens=2**16)
    assert content(tmp_path / "both") == content(tmp_path / "one")


def test_waiting_for_another_process_is_reported(tmp_path, config):
    stages = []
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def report(progress):
            stages.append(progress.stage)
            fcntl.flock(file, fcntl.LOCK_UN)

        prepare(config, tmp_path, progress=report)
    assert stages[0] == "waiting for another process" and "packing" in stages


class CutError(Exception):
    """The power failed."""


@pytest.fixture
def config(tmp_path):
    rows = [{"id": f"d{i}", "text": f"text {i} " * (i % 5)} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train=(f"{tmp_path}/rows.jsonl",), held_out_fraction=0.2, workers=1)


def test_cut_before_every_rename_it_goes_on_where_it_was(config, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    whole = content(prepare(config, tmp_path / "whole", shard_tokens=200))
    replace, encode = Path.replace, ByteTokenizer.encode
    encoded = []

    num_cuts = sum(name != "lock" for name in whole)
    assert num_cuts >= 20
    for number in range(num_cuts):
        directory = tmp_path / f"cut{number}"
        left = [number]

        def replace_some(path, target, left=left):
            if not left[0]:
                raise CutError
            left[0] -= 1
            return replace(path, target)

        monkeypatch.setattr(Path, "replace", replace_some)
        with pytest.raises(CutError):
            prepare(config, directory, shard_tokens=200)
        monkeypatch.setattr(Path, "replace", replace)
        finished = sum(json.loads(path.read_text())["num_documents"] for path in directory.glob("*-*.json"))
        encoded.clear()
        monkeypatch.setattr(
            ByteTokenizer, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
        )
        prepare(config, directory, shard_tokens=200)
        monkeypatch.setattr(ByteTokenizer, "encode", encode)
        assert len(encoded) == 60 - finished
        assert content(directory) == whole


def test_a_complete_directory_is_not_touched(config, tmp_path):
    directory = prepare(config, tmp_path / "out")
    os.utime(directory / "index.json", ns=(1, 1))
    before = finished_files(directory)
    prepare(config, directory)
    assert finished_files(directory) == before
    assert (directory / "index.json").stat().st_mtime_ns == 1
