"""`diloco watch` in a terminal, and the address that it prints."""

import re
import shutil
import threading
import urllib.request

import pytest
from tests.cli.commands import refusal
from tests.rendezvous.handwritten import Handwritten

from diloco.cli.main import main
from diloco.rendezvous.log.entries import Leave
from diloco.report.live import watched
from diloco.report.live.server import LiveServer
from diloco.report.live.watched import Watched


def test_finished_runs_are_shown_once_beside_a_store(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["watch", str(finished_run)])
    printed = capsys.readouterr().out
    assert re.search(r"step +120 of 120", printed) and printed.count("finished") == 1
    run = Handwritten(tmp_path / "store")
    run.train(1)
    run.append(Leave(finished=True), author=0)
    main(["watch", str(finished_run), str(run.directory)])
    printed = capsys.readouterr().out
    assert "120 of 120" in printed and re.search("of [0-9] replicas active, finished", printed)


def test_a_run_is_shown_again_until_it_is_over(finished_run, tmp_path, capsys, monkeypatch):
    copies = iter(("one", "two"))

    def sleep(_: float) -> None:
        shutil.copytree(finished_run, tmp_path / "runs" / next(copies))
        if (tmp_path / "runs" / "two").exists():
            (tmp_path / "runs" / "two" / "config.json").touch()

    monkeypatch.setattr("time.sleep", sleep)
    main(["watch", str(tmp_path / "runs"), "--every-seconds", "7"])
    printed = capsys.readouterr().out
    assert "not begun" in printed and "finished" in printed
    everything = Watched([str(tmp_path / "runs"), str(tmp_path / "later")])
    everything.again()
    assert [run.directory.name for run in everything.runs] == ["one", "later"] and not everything.is_over


def test_a_source_that_cannot_be_looked_up_is_trouble_beside_the_others(finished_run):
    everything = Watched([str(finished_run), "x" * 300])
    everything.again()
    one, other = everything.runs
    assert one.standing == "finished" and other.standing.endswith("can't be read: File name too long")


def test_of_many_runs_those_that_began_last_are_shown(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "MOST_RUNS", 2)
    for name in "cba":
        (tmp_path / name).mkdir()
        for file in ("data.json", "config.json"):
            shutil.copy(finished_run / file, tmp_path / name)
    shown = Watched([str(tmp_path)])
    shown.again()
    assert [run.directory.name for run in shown.runs] == ["a", "b"] and shown.num_left_out == 1


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a run's directory, a directory of runs, or a store"),
        (["x", "--every-seconds", "0"], "--every-seconds=0.0 must be above 0"),
        (["x", "--every-seconds", "inf"], "--every-seconds=inf must be above 0 and at most 86400"),
        (["x", "--port", "8080"], "--port=8080 means nothing without --serve: add that, or leave it out"),
        (["x", "--serve", "--port", "99999"], "--port=99999 can't be used"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, capsys):
    assert refusal(capsys, "watch", *arguments).startswith(sentence)
