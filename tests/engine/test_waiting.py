"""Decisions that wait: few in memory, and each fragment in its turn."""

from types import SimpleNamespace

from diloco.engine.elastic import Waiting


class Board:
    """A rendezvous that has three decisions of fragment 0 at each call."""

    def __init__(self) -> None:
        self.calls: list[int | None] = []

    def decided(self, *, wait_for: int | None = None) -> list[SimpleNamespace]:
        self.calls.append(wait_for)
        return [SimpleNamespace(fragment=0)] * 3


def test_no_more_is_received_while_two_a_fragment_wait_unless_one_is_waited_for():
    waiting, board = Waiting(2), Board()
    for _ in range(5):
        waiting.listen(board)
    assert board.calls == [None, None] and len(waiting.by_fragment[0]) == 6 and waiting
    waiting.listen(board, wait_for=1)
    assert board.calls == [None, None, 1]
    waiting.by_fragment[0].clear()
    assert not waiting


def test_after_an_interruption_the_next_fragment_comes_first():
    waiting = Waiting(3)
    assert list(waiting.in_turn()) == [0, 1, 2]
    waiting.interrupted_at(0)
    assert list(waiting.in_turn()) == [1, 2, 0]
    waiting.interrupted_at(2)
    assert list(waiting.in_turn()) == [0, 1, 2]
