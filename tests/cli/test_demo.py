"""`diloco demo`: real replicas, one of which is killed; and its page while it runs."""

import json
import os
import re
import signal
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from tests.processes import program

from diloco.cli.main import main
from diloco.rendezvous.status import Look
from diloco.report.runs import run_facts
from diloco.training.records.tail import RunTail

COMMAND = ["demo", "--recipe", "tiny", "--num-tokens", "120000", "--link", "50Mbit", "--no-browser"]


def processes_in(folder: Path) -> list[str]:
    """The processes that work in a folder."""
    numbers = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            numbers += [process.name] if (process / "cwd").readlink() == folder else []
    return numbers


@pytest.mark.slow
def test_a_replica_is_killed_and_comes_back_and_nothing_is_left(tmp_path):
    with program(main, COMMAND, folder=tmp_path, OMP_NUM_THREADS="1") as demo:
        page = re.search(r"http://127\S+", demo.wait_for_lines(4)[-1])
        assert page is not None
        with urllib.request.urlopen(f"{page[0]}page.json", timeout=30) as answer:
            sections = json.load(answer)["sections"]
        assert any("demo-store" in section["title"] for section in sections)
        done = demo.wait(150)
    assert done.returncode == 0, done.stdout + done.stderr
    words = "kill -9", "they train on", "started again", "counts spot again", "verified", "the model writes"
    places = [done.stdout.find(word) for word in words]
    assert places[0] > 0 and places == sorted(places), done.stdout

    look = Look(str(tmp_path / "runs" / "demo-store"), with_timeline=True)
    assert look.again().finished and look.timeline is not None
    lives = {life.name: [life] for life in look.timeline.lives if life.end == "left"}
    (first,) = [life for life in look.timeline.lives if life.end != "left"]
    assert lives.keys() == {"demo-home", "demo-lab", "demo-spot"}
    assert first.name == "demo-spot" and first.counted and lives["demo-spot"][0].counted
    spot = RunTail(tmp_path / "runs" / "demo-spot")
    spot.read()
    assert run_facts(spot)["outer hash"] in done.stdout
    assert not processes_in(tmp_path)


def test_without_the_library_of_stores_nothing_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SystemExit, match="2"):
        main(COMMAND)
    assert capsys.readouterr().err == "diloco: obstore is not installed: run pip install 'diloco[store]'\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_it_runs_beside_an_earlier_one_and_ctrl_c_ends_all_of_it(tmp_path):
    (tmp_path / "runs" / "demo-store").mkdir(parents=True)
    with program(main, COMMAND, folder=tmp_path, OMP_NUM_THREADS="1") as demo:
        lines = demo.wait_for_lines(5)
        assert "--name demo-2-home" in lines[2] and "has joined" in lines[4]
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(30).returncode == 130
    deadline = time.monotonic() + 10
    while processes_in(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
