"""Decisions that wait: few in memory, and each fragment in its turn."""

from types import SimpleNamespace

from diloco.engine.elastic import Waiting


def test_two_decisions_per_fragment_have_room_and_those_that_were_waited_for_may_exceed_it():
    waiting = Waiting(2)
    assert waiting.room == 4 and not waiting
    waiting.put([SimpleNamespace(fragment=0)] * 3)
    assert waiting.room == 1 and len(waiting.by_fragment[0]) == 3 and waiting
    waiting.put([SimpleNamespace(fragment=1)] * 3)
    assert waiting.room == -2
    waiting.by_fragment[0].clear()
    assert waiting.room == 1


def test_after_an_interruption_the_next_fragment_comes_first():
    waiting = Waiting(3)
    assert list(waiting.in_turn()) == [0, 1, 2]
    waiting.interrupted_at(0)
    assert list(waiting.in_turn()) == [1, 2, 0]
    waiting.interrupted_at(2)
    assert list(waiting.in_turn()) == [0, 1, 2]
