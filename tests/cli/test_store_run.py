"""`diloco store status` and `verify`, and the verbs that read a run's Θ, on a run in a store."""

import json

import pytest
from safetensors.torch import save_file
from tests.rendezvous.handwritten import Handwritten

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
    printed = capsys.readouterr().out
    assert "3 of 3 replicas active" in printed and "8 outer steps (rounds by fragment: 4 4)" in printed
    assert "1,140 tokens counted" in printed and "$ on S3" in printed and "$ on R2" in printed
    main(["store", "status", url, "--json"])
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["replicas"]] == ["a", "b", "c"]


def test_watching_ends_with_the_run(run, capsys, monkeypatch) -> None:
    from diloco.rendezvous.log.entries import Leave

    monkeypatch.setattr("time.sleep", lambda seconds: run.append(Leave(finished=True), author=0))
    main(["store", "status", str(run.directory), "--watch"])
    printed = capsys.readouterr().out
    assert "since the last look" in printed and "finished" in printed


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
    assert "4 of 4 repeated" in capsys.readouterr().out


def test_a_fault_is_named_with_what_was_checked_before_it(run, capsys) -> None:
    path = run.path("payloads/1/00000000")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="1"):
        main(["store", "verify", str(run.directory)])
    out, error = capsys.readouterr()
    assert f"entries      {run.state.number}: chain" in out
    assert error.startswith(f"diloco: {run.directory} is not sound: entry 3 of the log counts a payload")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["store", "status", "nowhere"], "nowhere holds no run: log/0000000000 is missing"),
        (["store", "verify", "nowhere"], "nowhere holds no run: log/0000000000 is missing"),
        (["store", "status", "RUN", "--every-seconds", "0"], "--every-seconds=0.0 must be above 0"),
        (
            ["store", "status", "RUN", "--every-seconds", "1e9"],
            "--every-seconds=1000000000.0 must be above 0 and at",
        ),
        (["store", "verify", "RUN", "--initial", "nowhere"], "--initial=nowhere can't be read as safetensors"),
        (["eval", "RUN"], "the run is a program's own, and does not describe its model"),
        (["eval", "RUN", "--parameters", "average"], "the run is a program's own"),
        (["export", "RUN", "--to", "hf", "--output", "x"], "the run is a program's own"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, run, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(run.directory) if argument == "RUN" else argument for argument in arguments])
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
