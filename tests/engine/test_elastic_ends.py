"""How a replica among others ends when something is wrong with it, while the others go on."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.test_elastic import counted, until
from tests.rendezvous.replicas import Replica, new_model

from diloco.errors import DilocoError
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.replay import replayed


def ends(condition: Callable[[], bool], *replicas: Replica, seconds: float = 20.0) -> dict[str, str]:
    """Let the replicas step until a condition holds; the sentences of those that end, by name."""
    sentences: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it takes too long: {sentences}"
        for replica in replicas:
            if replica.exchange.name not in sentences:
                try:
                    replica.step()
                except DilocoError as error:
                    sentences[replica.exchange.name] = str(error)
                    replica.vanish()
        time.sleep(0.003)
    return sentences


def assert_sound(folder: Path, *survivors: Replica) -> None:
    """The log can be replayed, and whoever joins begins with what comes out."""
    for survivor in survivors:
        survivor.finish()
    replay = replayed(str(folder), initial=lambda facts: dict(new_model().named_parameters()))
    joiner = Replica(str(folder), name="joiner")
    joiner.vanish()
    assert replay.checked.steps and joiner.engine.outer_hash() == parameters_hash(replay.parameters())


@pytest.mark.parametrize("kind", ["outer", "velocity"])
def test_only_the_replica_whose_memory_changed_ends(kind: str, tmp_path) -> None:
    a, b, c = members = [Replica(str(tmp_path), name=name, patience=1000) for name in "abc"]
    until(lambda: min(min(counted(member)) for member in members) >= 0, *members)
    c.engine._rounds.state.use(kind, 0)[0] += 1.0
    rounds = a.rounds[0] + 6
    sentences = ends(lambda: min(a.rounds[0], b.rounds[0]) >= rounds, *members)
    assert list(sentences) == ["c"]
    assert "the outer parameters of fragment 0" in sentences["c"] and "start this replica again" in sentences["c"]
    # A changed momentum shows after the next outer step.
    assert ("this computer's memory changed; nothing was sent or merged" in sentences["c"]) == (kind == "outer")
    assert_sound(tmp_path, a, b)


def test_a_payload_that_was_taken_against_another_base_is_left_out(tmp_path, caplog) -> None:
    a, b = members = [Replica(str(tmp_path), name=name, patience=100) for name in "ab"]
    until(lambda: min(counted(b)) >= 0 and 0 not in b.engine._rounds.in_flight, *members)
    b.exchange._following._decision = lambda: None
    rounds = b.engine._rounds
    rounds.state.use("outer", 0).add_(1.0)
    rounds.bases[0] = rounds.state.checksum(0)
    seq = counted(b)[0]
    with caplog.at_level(logging.WARNING, "diloco"):
        goal = a.rounds[0] + 2
        sentences = ends(lambda: a.rounds[0] >= goal, *members)
    assert "before round" in sentences["b"] and "an outer step gave other bits, here or where" in sentences["b"]
    assert counted(b)[0] == seq
    left_out = "was taken against other outer parameters than the run's after round"
    assert sum(left_out in record.getMessage() for record in caplog.records) == 1
    assert_sound(tmp_path, a)
