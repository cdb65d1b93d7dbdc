"""The table of the page on unequal machines: the simulation of its file."""

import re
from dataclasses import replace

import pytest
from tests.running import ROOT, SNIPPETS

from diloco.simulator.churn import in_store
from diloco.simulator.fixed_members import with_members
from diloco.simulator.fleet import read_fleet

PAGE = (ROOT / "docs" / "how-to" / "unequal-machines.md").read_text()
ROWS = re.findall(r"\| (\d) s \| (\d+) \| ([\d.]+)[^|]*\| ([\d.]+) \| ([\d.]+) %", PAGE)


@pytest.mark.parametrize(("step_seconds", "overlap_steps", "contributors", "staleness", "goodput"), ROWS)
def test_the_page_says_what_the_simulation_of_its_file_says(
    step_seconds: str, overlap_steps: str, contributors: str, staleness: str, goodput: str
) -> None:
    run = read_fleet(SNIPPETS / "three_machines.toml")
    *fast, mac = run.machines
    mac = replace(mac, step_seconds=float(step_seconds))
    run = replace(run, machines=(*fast, mac), overlap_steps=int(overlap_steps))
    store = in_store(run, num_outer_steps=1000)
    assert store.contributors == pytest.approx(float(contributors), abs=0.05)
    assert store.staleness == pytest.approx(float(staleness), abs=0.01)
    assert 100 * store.goodput == pytest.approx(float(goodput), abs=0.06)
    fixed = with_members(run, "fixed", seconds=store.seconds)
    assert 100 * fixed.goodput == pytest.approx({"2": 47, "6": 18}[step_seconds], abs=0.5)


def test_the_page_has_rows() -> None:
    assert len(ROWS) == 4
