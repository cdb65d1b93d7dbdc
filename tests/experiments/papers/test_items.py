"""The table of all items of both papers: none is missing, each has a verdict, and each command and file exists."""

import csv
import re
import shlex
from pathlib import Path

import pytest

from diloco.cli import _command, sweep, train
from diloco.cli.main import main
from diloco.experiments.papers import EXPERIMENTS
from diloco.report.figures.simulator import FIGURES

ROOT = Path(__file__).parents[3]
ITEMS = list(csv.DictReader((ROOT / "docs" / "results" / "papers.csv").read_text().splitlines()))
NUMBERS = {
    "2501.18512": {"Algorithm": 2, "Figure": 19, "Table": 8},
    "2503.09799": {"Algorithm": 1, "Figure": 19, "Table": 13, "Finding": 4},
}
"""The last number of each kind of item in each paper."""
VERDICT = re.compile(
    "reproduced exactly|reproduced within ([0-9.]+( %)?|one point of its grid)|agrees|disagrees|"
    "(within|above|below) the band|cannot be tested at this size|drawn|taken over"
)


def test_every_item_has_its_row_and_its_verdict():
    for paper, last in NUMBERS.items():
        items = [row["item"] for row in ITEMS if row["paper"] == paper]
        assert len(set(items)) == len(items)
        for kind, number in last.items():
            heads = [item.partition(":")[0] for item in items if item.startswith(kind)]
            numbers = {int(digits) for head in heads for digits in re.findall(r"\d+", head)}
            assert numbers == set(range(1, number + 1)), (paper, kind)
    assert [row["item"] for row in ITEMS if not VERDICT.fullmatch(row["verdict"])] == []
    assert [row["item"] for row in ITEMS if not (ROOT / (row["file"] or "none")).is_file()] == []


@pytest.mark.parametrize("command", sorted({row["command"] for row in ITEMS} - {""}))
def test_a_command_of_the_table_is_one(command, monkeypatch):
    program, verb, *_ = words = shlex.split(command)
    if program == "python":
        assert (ROOT / verb).is_file()
        return
    calls = []
    monkeypatch.setattr(_command, "partial", lambda *values, **named: lambda: calls.append((values[1:], named)))
    monkeypatch.setattr(train, "_start", lambda *_: calls.append(((), {})))
    monkeypatch.setattr(sweep, "_sweep_of", lambda _: None)
    monkeypatch.setattr(sweep, "_run_sweep", lambda *_: calls.append(((), {})))
    main(words[1:])
    ((values, named),) = calls
    named |= dict(zip(("names",), values, strict=False))
    assert set(named.get("figures", ())) <= set(FIGURES)
    assert verb != "experiment" or set(named["names"]) <= set(EXPERIMENTS)
    assert named.get("data") is None or (ROOT / named["data"]).is_file()
