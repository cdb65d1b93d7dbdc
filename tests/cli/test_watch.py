"""`diloco watch` in a terminal, and the address that it prints."""

import os
import re
import shutil
import signal
import threading
import urllib.request

import pytest
from tests.rendezvous.handwritten import Handwritten
from tests.training.runs import TIMEOUT_SECONDS, started, wait_for_step

from diloco.cli.main import main
from diloco.report import sources
from diloco.report.runs import LOSS, run_facts
from diloco.report.server import LiveServer
from diloco.report.sources import Sources
from diloco.training.records.runs import running
from diloco.training.records.tail import RunTail


def test_finished_runs_are_shown_once_beside_a_store(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["watch", str(finished_run)])
    printed = capsys.readouterr().out
    assert re.search(r"step +120 of 120", printed) and printed.count("finished") == 1
    run = Handwritten(tmp_path / "store")
    run.train(1)
    run.close()
    main(["watch", str(finished_run), str(run.directory)])
    printed = capsys.readouterr().out
    assert "120 of 120" in printed and f"{run.directory}: finished" in printed
    assert re.search("replicas active +0 of 2", printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "notes"),
    [
        (signal.SIGKILL, r"Process \d+ on \S+ since \S+ \S+ was killed; go on with: diloco train tiny --resume"),
        (
            signal.SIGINT,
            r"Stopped by SIGINT: every replica has saved step (\d+); go on from step \1 with: diloco train tiny "
            "--resume",
        ),
    ],
)
def test_a_stopped_run_is_called_so_with_how_and_the_command_to_go_on(
    number, notes, small_corpus, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    shutil.copy(small_corpus, tmp_path / "text.jsonl")
    with started(tmp_path, "--name", "one", "--num-tokens", "10M") as process:
        wait_for_step(process, tmp_path / "runs" / "one", step=3, num_replicas=2)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.wait(TIMEOUT_SECONDS)
    monkeypatch.chdir(tmp_path)
    for words in (["one"], []):  # a run's name, and the newest run
        main(["watch", *words])
        printed = capsys.readouterr().out
        assert printed.startswith("one: stopped") and "ETA" not in printed
        assert re.search(f"^{notes} runs/one *$", printed, re.MULTILINE), printed


@pytest.mark.parametrize("command", ["watch", "report", "eval", "generate", "chat", "train tiny --resume"])
def test_a_run_that_is_not_there_is_refused_with_the_nearest(command, finished_run, tmp_path, capsys, monkeypatch):
    shutil.copytree(finished_run, tmp_path / "runs" / "one", ignore=shutil.ignore_patterns("checkpoints"))
    monkeypatch.chdir(tmp_path)
    for name, hint in (("on", "did you mean runs/one?"), ("xyz", "there are runs/one")):
        with pytest.raises(SystemExit, match="2"):
            main([*command.split(), name])
        assert capsys.readouterr().err == f"diloco: {name} holds no run: {name}/config.json is missing; {hint}\n"


def test_several_runs_are_a_table_of_the_facts_of_each(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("one", "two"):
        shutil.copytree(finished_run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
    main(["watch", str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "finished" in line]
    run = RunTail(finished_run)
    run.read()
    facts = run_facts(run)
    for row, name in zip(rows, ("one", "two"), strict=True):
        assert row.split()[:2] == [name, "finished"]
        assert all(facts[fact] in row for fact in ("step", LOSS, "held-out loss", "tokens/s", "sent per replica"))


def test_a_store_is_shown_with_speeds_until_its_run_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = Handwritten(tmp_path / "store")
    run.train(1)
    looks = iter(
        [
            lambda: run.step(0, [run.send(0, replica) for replica in range(2)]),
            run.close,
        ]
    )
    monkeypatch.setattr("time.sleep", lambda _: next(looks)())
    main(["watch", str(run.directory)])
    first, second, third = capsys.readouterr().out.split(f"{run.directory}: ")[1:]
    assert [text.split()[0] for text in (first, second, third)] == ["running", "running", "finished"]
    assert ["tokens/s" in text for text in (first, second, third)] == [False, True, False]
    (speed,) = re.findall(r"0 a +active .* ([\d.]+) +0 +[\d.]+ +\d+ *\n", second)
    assert float(speed) > 0


def test_a_store_that_is_damaged_is_trouble_in_the_terminal_and_refused_by_the_report(tmp_path, capsys):
    run = Handwritten(tmp_path / "store")
    run.train(1)
    shown = Sources([str(run.directory)])
    shown.again()
    assert shown.stores[0].standing == "running" and not shown.is_over
    newest = max(path for path in (run.directory / "log").rglob("*") if path.is_file())
    newest.write_bytes(b"{")
    damaged = Sources([str(run.directory)])
    damaged.again()
    (store,) = damaged.stores
    assert "can't be used" in store.standing and store.trouble and not damaged.is_over
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run.directory), "--output", str(tmp_path / "report.html")])
    assert capsys.readouterr().err.strip().endswith(store.trouble)


def test_a_run_is_shown_again_until_it_is_over(finished_run, tmp_path, capsys, monkeypatch):
    def sleep(_: float) -> None:
        shutil.copytree(finished_run, run, dirs_exist_ok=True)

    run = tmp_path / "runs" / "one"
    monkeypatch.setattr("time.sleep", sleep)
    with running(run):  # it is about to begin
        main(["watch", str(run), "--every-seconds", "7"])
    printed = capsys.readouterr().out
    assert "not begun" in printed and "finished" in printed
    everything = Sources([str(tmp_path / "runs"), str(tmp_path / "later")])
    everything.again()
    assert [run.directory.name for run in everything.runs] == ["one", "later"] and not everything.is_over


def test_a_source_that_cannot_be_looked_up_is_trouble_beside_the_others(finished_run):
    everything = Sources([str(finished_run), "x" * 300])
    everything.again()
    one, other = everything.runs
    assert one.standing == "finished" and other.standing.endswith("can't be read: File name too long")


def test_of_many_runs_those_that_began_last_are_shown(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_RUNS", 2)
    for name in "cba":
        (tmp_path / name).mkdir()
        for file in ("data.json", "config.json"):
            shutil.copy(finished_run / file, tmp_path / name)
    shown = Sources([str(tmp_path)])
    shown.again()
    assert [run.directory.name for run in shown.runs] == ["a", "b"] and shown.note == "1 older runs are left out"


def test_the_address_is_printed_and_answers_until_an_interruption(finished_run, capsys, monkeypatch):
    serve = LiveServer.serve

    def ask(server: LiveServer) -> None:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        titles.append(
            re.findall("<title>(.*)</title>", urllib.request.urlopen(server.url, timeout=20).read().decode())
        )
        raise KeyboardInterrupt

    titles: list[list[str]] = []
    monkeypatch.setattr(LiveServer, "serve", ask)
    with pytest.raises(SystemExit, match="130"):
        main(["watch", str(finished_run), "--serve"])
    assert capsys.readouterr().out.startswith("http://127.0.0.1:") and titles == [["diloco: streaming"]]
