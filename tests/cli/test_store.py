"""`diloco store`: status and verify of a run, and check of a store."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tests.rendezvous.handwritten import Handwritten
from tests.servers import Server

from diloco.cli.main import main
from diloco.outer.digest import parameters_hash


@pytest.fixture
def run(tmp_path) -> Handwritten:
    run = Handwritten(tmp_path / "run")
    run.train(4, snapshots_after=(2,))
    return run


def test_the_status_is_printed_as_a_table_or_as_json(run, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    url = str(run.directory)
    main(["store", "status", url])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    facts = {" ".join(line[:2]): " ".join(line[2:]) for line in lines}
    assert facts["replicas active"] == "3 of 3" and facts["tokens counted"] == "1,140"
    assert facts["training loss"] == "1.7500, mean of the last 5 % of outer steps"
    assert facts["loss so"] == "far 4.75 ██▆▆▃▃▁▁ 1.75"
    assert facts["outer steps"] == "8" and facts["rounds by"] == "fragment 4 4"
    assert "$ on S3" in facts["cost so"] and "$ on R2" in facts["cost of"]
    assert [line[:3] for line in lines if "of 8" in " ".join(line)] == [
        [number, name, "active"] for number, name in ("2c", "1b", "0a")
    ]
    main(["store", "status", url, "--json"])
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["replicas"]] == ["a", "b", "c"]


def test_a_sound_run_is_verified(run, tmp_path, capsys) -> None:
    save_file(run.initial, tmp_path / "initial.safetensors")
    main(["store", "verify", str(run.directory), "--initial", str(tmp_path / "initial.safetensors")])
    printed = capsys.readouterr().out
    assert "8 of 8 repeated" in printed and "note:" not in printed
    assert f"outer hash   {parameters_hash(run.theta())}" in printed
    main(["store", "verify", str(run.directory)])
    printed = capsys.readouterr().out
    assert "4 of 8 repeated" in printed and "note: the outer parameters were checked from the oldest" in printed
    main(["store", "verify", str(run.directory), "--from-snapshot"])
    printed = capsys.readouterr().out
    assert "4 of 4 repeated" in printed and "closes the run" not in printed
    number = run.close()
    main(["store", "verify", str(run.directory)])
    assert f"chain, signatures, validity; entry {number} closes the run" in capsys.readouterr().out


def test_a_fault_is_named_with_what_was_checked_before_it(run, capsys) -> None:
    path = run.path("payloads/1/00000000")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="1"):
        main(["store", "verify", str(run.directory)])
    out, error = capsys.readouterr()
    assert f"entries      {run.state.number}: chain" in out
    assert error.startswith(f"diloco: {run.directory} is not sound: entry 3 of the log counts a payload")


@pytest.mark.slow
def test_a_check_is_printed_as_text_or_as_json(directory: Server, capsys: pytest.CaptureFixture[str]):
    main(["store", "check", directory.url, "--rounds", "3", "--racers", "2"])
    assert "each of 3 races of 2 had one winner" in capsys.readouterr().out
    main(["store", "check", directory.url, "--rounds", "3", "--racers", "2", "--json"])
    checked = json.loads(capsys.readouterr().out)
    assert checked["num_racers"] == 2 and checked["num_races"] == 3 and checked["trouble"] == ""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize(
    ("options", "sentence"), [("size=1m", "no space left on device"), ("ro", "read-only file system")]
)
def test_a_directory_that_is_full_or_read_only(options: str, sentence: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("diloco.rendezvous.check._PATIENCE_SECONDS", 1.0)  # a full disk may be emptied
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"can't mount: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(SystemExit, match="1"):
            main(["store", "check", str(tmp_path), "--rounds", "1"])
        error = capsys.readouterr().err
        assert sentence in error and str(tmp_path) in error and error.count("\n") == 1
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
