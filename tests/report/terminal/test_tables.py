import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.simulator.cases import task, with_replicas

from diloco.report.terminal.tables import print_remedy
from diloco.simulator.planner import Task, feasible, remedy


def printed(wanted: Task) -> tuple[str, dict[str, float]]:
    """The sentence about an infeasible target, and its numbers as printed."""
    console = Console(width=10_000, file=io.StringIO())
    print_remedy(wanted, remedy(wanted), console)
    sentence = console.file.getvalue()
    patterns = {
        "gbit_s": "links of ([^ ]+) G",
        "latency_seconds": "latency of ([^ ]+) s on every link",
        "factor": "compute ([^ ]+) times",
        "target": r"a target of ([0-9.]+?)[.;]?( |$)",
    }
    matches = {name: re.search(pattern, sentence) for name, pattern in patterns.items()}
    return sentence, {name: float(match[1]) for name, match in matches.items() if match is not None}


def test_every_printed_number_is_rounded_to_where_it_is_still_enough():
    wanted = task(0.006, latency_seconds=0.0)
    sentence, numbers = printed(wanted)
    assert "No setting reaches a compute utilization of 0.95 here." in sentence and "latency" not in sentence
    assert feasible(with_replicas(wanted, gbit_s=numbers["gbit_s"]))
    longer = with_replicas(wanted, step_seconds=2.3 * numbers["factor"])
    assert feasible(replace(longer, num_steps=int(66_757 / numbers["factor"])))
    assert feasible(replace(wanted, target=numbers["target"]))
    far = task(10.0, latency_seconds=300.0)
    _, numbers = printed(far)
    assert feasible(with_replicas(far, latency_seconds=numbers["latency_seconds"]))
    assert "gbit_s" not in numbers


def test_a_slow_replica_is_named_as_the_limit():
    wanted = task(1e3, num_replicas=2)
    first, *others = wanted.replicas
    wanted = replace(wanted, replicas=(replace(first, step_seconds=3 * first.step_seconds), *others))
    sentence, numbers = printed(wanted)
    assert "More than 0.667 can't be reached by replicas with these step times" in sentence
    assert set(numbers) == {"target"} and numbers["target"] == pytest.approx(2 / 3, abs=0.01)
