"""The index: the bookkeeping of the log up to an entry, so that a joiner need not read the log from its beginning.

An index is two lines like an entry: compact JSON, and its author's signature of it. `kind` keeps the two apart.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from diloco.errors import FileError
from diloco.rendezvous.entries import SIGNATURE, LogError
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.state import MOST_NORMS, FragmentLog
from diloco.schema import decoded

MOST_BYTES = 1 << 25
"""Length of the longest index that is read."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The state after the entries 0 … k−1, by one replica's word."""

    kind: Literal["index"] = "index"
    author: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    state: RunState

    def line(self) -> bytes:
        """The JSON line, which is what is signed."""
        text = json.dumps(msgspec.to_builtins(self), separators=(",", ":"), sort_keys=True, allow_nan=False)
        return text.encode() + b"\n"


def name_of(number: int) -> str:
    """The name of the index of the entries 0 … number − 1 in the store."""
    return f"index/{number:010d}"


def number_of(name: str) -> int | None:
    """The number of the index that an object is; None if it is none."""
    match = re.fullmatch(r"index/(\d{10})", name)
    return None if match is None else int(match[1])


def sealed(index: Index, signature: str) -> bytes:
    """The bytes of an index, from the signature of its line."""
    return index.line() + signature.encode() + b"\n"


def opened(data: bytes, *, number: int) -> tuple[Index, str]:
    """An index and its signature, from bytes that nobody has checked.

    The caller checks the signature against `index.state.members[index.author].key`, that key and the allow-list
    against entry 0 and the `kept` entries, and `state.previous` against the entry before.

    Args:
        data: the object.
        number: that of its name.

    Raises:
        LogError: naming the index, if `sealed` does not write these bytes, or no log leads to this state.
    """
    source = f"index {number} of the log"
    if len(data) > MOST_BYTES:
        raise LogError(f"{source} can't be read: it has more than {MOST_BYTES:,} bytes")
    line, _, rest = data.partition(b"\n")
    try:
        index = decoded(line, Index, source=source)
        signature = rest.removesuffix(b"\n").decode("ascii")
        is_canonical = sealed(index, signature) == data and SIGNATURE.fullmatch(signature)
    except FileError as error:
        raise LogError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise LogError(f"{source} can't be read: {error}") from None
    if not is_canonical:
        raise LogError(f"{source} can't be read: its bytes are not in the form in which diloco writes them")
    if reason := next(_contradictions(index, number), None):
        raise LogError(f"{source} can't be true: {reason}")
    return index, signature


def _contradictions(index: Index, number: int) -> Iterator[str]:
    """The reasons, in words, why no log leads to a state."""
    state = index.state
    members, num_slots = state.members, state.rules.num_slots
    held = [member for member in members if not member.fenced]
    if state.number != number or number < 1 + len(members) + state.num_outer + len(state.kept):
        yield f"it counts {state.number} entries"
    if index.author >= len(members) or members[index.author].fenced:
        yield f"its author, replica {index.author}, has not joined, or was replaced"
    if len(state.fragments) != state.rules.num_fragments:
        yield f"it has {len(state.fragments)} fragments"
    if len({m.slot for m in held}) < len(held) or len({m.name for m in held}) < len(held):
        yield "two replicas share a slot or a name"
    if any(m.slot >= num_slots or not m.joined <= m.last_outer <= state.num_outer for m in members):
        yield "a replica has a slot, or outer entries, that the run has not"
    if any(slot >= num_slots for slot in state.positions):
        yield "a slot has a position, and the run has no such slot"
    if state.tokens != sum(m.tokens for m in members) or state.num_outer != sum(f.round for f in state.fragments):
        yield "its sums are wrong"
    if not state.creator and (state.allowed or state.kept or any(m.key for m in members)):
        yield "it has keys, in a run without keys"
    if state.creator and ("" in state.allowed or not all(m.key for m in members)):
        yield "it has replicas without keys, in a run with keys"
    if not _ascends([0, *state.kept, number]):
        yield "its changes of the allow-list are out of order"
    for fragment, log in enumerate(state.fragments):
        if reason := next(_contradictions_of(state, fragment, log), None):
            yield f"of fragment {fragment}, {reason}"


def _contradictions_of(state: RunState, fragment: int, log: FragmentLog) -> Iterator[str]:
    rules, members = state.rules, state.members
    if len(log.before) != min(log.round, rules.max_stale + 1):
        yield f"it has {len(log.before)} checksums after {log.round} rounds"
    if not min(log.round, MOST_NORMS) <= len(log.norms) <= MOST_NORMS or (log.norms and not log.round):
        yield f"it has {len(log.norms)} norms after {log.round} rounds"
    for replica, seq in log.last_seq.items():
        if replica >= len(members) or members[replica].fenced:
            yield f"payload {seq} of replica {replica} can't have been counted"
    for slot, number in log.last_round.items():
        if slot >= rules.num_slots or not 0 < number <= log.round:
            yield f"round {number} can't have counted the replica of slot {slot}"
    rounds = [ref.round for ref in log.snapshots]
    if len(rounds) > 2 or not _ascends([0, *rounds, log.round + 1]):
        yield f"it has snapshots of the rounds {rounds} after {log.round} rounds"
    if not _ascends([0, *(ref.number for ref in log.snapshots), state.number]):
        yield "its snapshots are out of order"
    first = rounds[0] if len(rounds) == 2 else 0
    if [ref.body.round for ref in log.since] != list(range(first + 1, log.round + 1)[: len(log.since) + 1]):
        yield f"its outer entries are not those of the rounds {first + 1} to {log.round}"
    if not _ascends([0, *(ref.number for ref in log.since), state.number]):
        yield "its outer entries are out of order"
    newest = tuple(ref.body.before for ref in log.since)[-len(log.before) :] if log.before else ()
    if newest and newest != log.before[-len(newest) :]:
        yield "its checksums are not those of its outer entries"
    for ref in log.since:
        replicas = [c.replica for c in ref.body.contributions]
        if ref.body.fragment != fragment or not replicas or not _ascends([-1, *replicas, len(members)]):
            yield f"outer entry {ref.number} has wrong contributions"


def _ascends(numbers: list[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
