"""The index: the state in bytes and back, and refused where the state machine can't go on from it."""

from dataclasses import replace

import pytest
from tests.rendezvous.cases import Log

from diloco.rendezvous.log.entries import Leave, LogError, Snapshot
from diloco.rendezvous.log.index import INDEX, Index, open_index
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.run import Losses, RunState

A = "a" * 64


@pytest.fixture
def state() -> RunState:
    log = Log(num_fragments=2, max_stale=2).join("a", "b", "c").rounds(5, 0, 1).rounds(2, 1, 2, fragment=1)
    log.add(Snapshot(fragment=0, round=2, sha256=A), 0)
    log.add(Snapshot(fragment=0, round=4, sha256=A), 0)
    log.add(Leave(finished=False), 2)
    return log.join("a").state


def sealed(state: RunState, author: int = 1) -> bytes:
    return INDEX.seal(Index(author=author, state=state), Signer())


def reopened(state: RunState, author: int = 1) -> Index:
    return open_index(sealed(state, author), state.number).header


def test_a_state_comes_back_as_it_was(state):
    assert reopened(state) == Index(author=1, state=state)
    assert sealed(reopened(state).state) == sealed(state), "whoever writes it, from what"


def of_fragment(state: RunState, **changes) -> RunState:
    return replace(state, fragments=(replace(state.fragments[0], **changes), *state.fragments[1:]))


def of_member(state: RunState, **changes) -> RunState:
    return replace(state, members=(*state.members[:-1], replace(state.members[-1], **changes)))


def of_entry(state: RunState, **changes) -> RunState:
    ref = state.fragments[0].since[0]
    return of_fragment(state, since=(replace(ref, body=replace(ref.body, **changes)),))


CHANGES = {
    "fragments": lambda s: replace(s, fragments=s.fragments[:1]),
    "another number": lambda s: replace(s, number=s.number + 1),
    "not begun": lambda s: replace(s, is_complete=False),
    "no such slot": lambda s: of_member(s, slot=64),
    "no such replica": lambda s: of_fragment(s, last_seq={9: 0}),
    "no such contributor": lambda s: of_entry(s, contributions=(replace(CONTRIBUTION, replica=9),)),
    "losses of no outer steps": lambda s: replace(s, losses=Losses(parts=())),
    "more losses than there are": lambda s: replace(s, losses=Losses(parts=((1.0, 1),) * 300)),
    "no contributor": lambda s: of_entry(s, contributions=()),
    "another fragment": lambda s: of_entry(s, fragment=1),
}
CONTRIBUTION = Log(num_fragments=1).join("a").contribution(0)


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_from_which_nobody_can_read_on_is_refused(state, change):
    with pytest.raises(LogError, match=r"index \d+ of the log can't be true"):
        open_index(sealed(CHANGES[change](state)), state.number)


def test_an_index_is_of_its_number_and_of_a_replica_that_is_there(state):
    with pytest.raises(LogError, match="counts"):
        open_index(sealed(state), state.number + 1)
    for author in (0, 4):
        with pytest.raises(LogError, match=f"replica {author}"):
            reopened(state, author)
    with pytest.raises(LogError, match="cut short"):
        open_index(sealed(state)[:-1], state.number)
