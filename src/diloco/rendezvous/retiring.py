"""The objects of the store that nobody needs any more."""

import re
from collections.abc import Iterable

from diloco.rendezvous.machine import RunState

_PAYLOAD = re.compile(r"payloads/(\d{1,10})/(\d{1,20})(?:[-/].*)?")
_AVERAGE = re.compile(r"averages/(\d{10})/\d{1,10}")
_SNAPSHOT = re.compile(r"snapshots/(\d{1,10})/(\d{1,20})-([0-9a-f]{64})")
_INDEX = re.compile(r"index/(\d{10})")


def retirable(state: RunState, names: Iterable[str]) -> list[str]:
    """The objects that nobody needs any more

    A joiner reads the newest index, the last two snapshots of each fragment, the payloads and averages of the
    outer entries since the first of them, and the entries after the index. A replica that was away for longer does
    the same. Entries are never retired: a replica that wakes up after days would find its next entry absent, write
    it, and go on alone.

    Args:
        state: that of the newest index in the store.
        names: of objects in the store.
    """
    since = [ref for log in state.fragments for ref in log.since]
    counted = {(c.replica, c.seq) for ref in since for c in ref.body.contributions}
    needed = {ref.number for ref in since}
    snapshots = {
        (fragment, ref.round, sha256)
        for fragment, log in enumerate(state.fragments)
        for ref in log.snapshots
        for sha256 in ref.sha256
    }

    def is_retirable(name: str) -> bool:
        if match := _PAYLOAD.fullmatch(name):
            replica, seq = int(match[1]), int(match[2])
            return (replica, seq) not in counted and not _may_count(state, replica, seq)
        if match := _AVERAGE.fullmatch(name):
            return int(match[1]) < state.number and int(match[1]) not in needed
        if match := _SNAPSHOT.fullmatch(name):
            fragment, rounds = int(match[1]), int(match[2])
            if fragment >= len(state.fragments) or not (refs := state.fragments[fragment].snapshots):
                return False
            return rounds <= refs[-1].round and (fragment, rounds, match[3]) not in snapshots
        match = _INDEX.fullmatch(name)
        return match is not None and int(match[1]) < state.number

    return [name for name in names if is_retirable(name)]


def _may_count(state: RunState, replica: int, seq: int) -> bool:
    """Whether a payload may still enter an entry."""
    if replica >= len(state.members):
        return True  # of a replica that joined after the index
    # The log does not say of which fragment a payload is that was not counted.
    oldest = min(log.last_seq.get(replica, -1) for log in state.fragments)
    return not state.members[replica].fenced and seq > oldest
