"""Fleets beside what was measured: storms of faults on real replicas, and the time from a send to its decision."""

import csv
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def fleets() -> Iterator[ModuleType]:
    """benchmarks/fleets.py, which describes the storms to the simulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RESULTS.parents[1] / "benchmarks")
        yield import_module("fleets")
        for name in ("fleets", "fleet_storm", "storm_study", "elastic_study"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("row", rows("fault_storm"), ids=lambda row: f"{float(row['faults_an_hour']):.0f} an hour")
def test_goodput_in_the_trainers_storms_is_within_three_points(row: dict[str, str], fleets: ModuleType) -> None:
    outcomes, measured = fleets.trainers_storm(row, num_seeds=3)
    assert mean(outcome.goodput for outcome in outcomes) == pytest.approx(measured, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("fleet_storm"), ids=lambda row: f"{float(row['faults_an_hour']):.0f} an hour")
def test_goodput_and_send_to_decided_are_those_of_a_storm(row: dict[str, str], fleets: ModuleType) -> None:
    outcomes = fleets.simulate(row, num_seeds=24)  # which differ by 3 points
    assert mean(outcome.goodput for outcome in outcomes) == pytest.approx(float(row["goodput"]), abs=0.03)
    p50 = mean(outcome.decided_seconds[0] for outcome in outcomes)
    assert p50 == pytest.approx(float(row["decided_p50"]), rel=0.3)


def test_send_to_decided_on_quiet_machines_is_within_a_fifth(fleets: ModuleType) -> None:
    for row in fleets.rounds():
        assert row["decided_p50"] == pytest.approx(row["reference_p50"], rel=0.2), row["setting"]


def test_a_schedule_of_faults_is_what_its_victims_suffer(fleets: ModuleType) -> None:
    Fault = import_module("storm_study.faults").Fault
    faults = [
        Fault(10, "stop", "slow", 8),
        Fault(15, "stop", "slow", 10),  # until 25
        Fault(20, "kill", "slow", 0),  # which ends it: up again at 23
        Fault(30, "outage", "slow", 20),
        Fault(40, "kill", "slow", 0),  # up again at 53, since the store is away until 50
        Fault(51, "kill", "slow", 0),  # once more, at 54
        Fault(60, "kill", "third", 0),
        Fault(200, "kill", "slow", 0),
    ]
    slow = fleets.suffered(iter(faults), seconds=100, restart_seconds=3)["slow"]
    assert (slow.kills, slow.down_seconds, slow.stopped_seconds) == (3, 3 + 13 + 1, 10)
