"""The decisions that a replica has received and whose outer steps it has not taken yet."""

from collections import deque
from collections.abc import Iterator

from diloco.rendezvous.contract import Decision, Rendezvous
from diloco.rendezvous.delivery import MOST_DECISIONS_A_FRAGMENT


class Waiting:
    """Decisions by fragment, in the log's order; each holds its payloads in memory.

    Args:
        num_fragments: P.
    """

    def __init__(self, num_fragments: int) -> None:
        self.by_fragment: tuple[deque[Decision], ...] = tuple(deque() for _ in range(num_fragments))
        self._first = 0

    def __bool__(self) -> bool:
        """Whether there is one."""
        return any(self.by_fragment)

    def listen(self, rendezvous: Rendezvous, *, wait_for: int | None = None) -> None:
        """Receive decisions, unless many wait already; `wait_for` is as in `Rendezvous.decided`."""
        num_waiting = sum(map(len, self.by_fragment))
        if wait_for is not None or num_waiting < MOST_DECISIONS_A_FRAGMENT * len(self.by_fragment):
            for decision in rendezvous.decided(wait_for=wait_for):
                self.by_fragment[decision.fragment].append(decision)

    def in_turn(self) -> Iterator[int]:
        """The fragments, beginning with the one whose turn it is."""
        num_fragments = len(self.by_fragment)
        yield from ((self._first + later) % num_fragments for later in range(num_fragments))

    def interrupted_at(self, fragment: int) -> None:
        """Give the next turn to the fragment after this one, for which time was over."""
        self._first = (fragment + 1) % len(self.by_fragment)
