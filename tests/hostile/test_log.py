"""Entries of the log and indexes that were changed: refused by our own error, or valid and harmless."""

import json
import random
import resource
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hostile.mutations import generator, mutated_bytes, mutated_json
from tests.rendezvous.cases import Log
from tests.rendezvous.referee import FakeSigner, is_signed, public_key
from tests.rendezvous.simulated import Run, simulate
from tests.rendezvous.test_entries import object_of

from diloco.files import sha256
from diloco.rendezvous.contract import Form
from diloco.rendezvous.deciding import may_decide, of_the_run
from diloco.rendezvous.log.entries import MOST_ENTRY_BYTES, LogError
from diloco.rendezvous.log.index import INDEX, MOST_INDEX_BYTES, Index, open_index, retirable
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import ENTRY, source_of
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.status import status_of
from diloco.rendezvous.store_rendezvous import outer_entries_to_replay
from diloco.wire import codec

NUM_EXAMPLES = settings.get_profile("hostile").max_examples
CONTRIBUTION = Log(num_fragments=1).join("a").contribution(0)
KINDS = {"create", "join", "outer", "snapshot", "leave", "keys"}


@cache
def real_run() -> Run:
    """A run with keys whose log has entries of all kinds."""
    rng = random.Random(0)
    while True:
        run = simulate(bytes([1, 1, 1, 3, 3, 0]) + rng.randbytes(600))
        kinds = {ENTRY.open(data, "").header.kind for data in log_of(run)}
        if kinds == KINDS:
            return run


def log_of(run: Run) -> list[bytes]:
    return [run.store.objects[ENTRY.name(number)] for number in range(len(run.referee.states))]


def accept(number: int, data: bytes) -> RunState:
    """The state after an entry that takes the place of a real one."""
    opened = ENTRY.open(data, source_of(number))
    entry = opened.header
    if number == 0:
        if not is_signed(opened, getattr(entry.body, "creator", "")):
            raise LogError("forged")
        return RunState.begin(entry, sha256(data))
    state = real_run().referee.states[number - 1]
    if not is_signed(opened, state.signer(entry)):
        raise LogError("forged")
    return state.after(entry, sha256(data))


def accept_index(number: int, data: bytes) -> Index:
    opened = open_index(data, number)
    if not is_signed(opened, opened.header.state.members[opened.header.author].key):
        raise LogError("forged")
    return opened.header


def real_index(number: int) -> bytes:
    state = real_run().referee.states[number - 1]
    author = next(replica for replica, member in enumerate(state.members) if not member.fenced)
    return INDEX.seal(Index(author=author, state=state), FakeSigner(state.members[author].key))


def index_numbers() -> list[int]:
    states = real_run().referee.states
    return [state.number for state in states if any(not member.fenced for member in state.members)]


def read_on(state: RunState) -> None:
    """Do with a state what a joiner, a reader of the status and a live replica do.

    Raises:
        LogError: if the next entry does not follow it.
    """
    form = Form(codec=codec("fp32"), sizes=(4,) * state.rules.num_fragments, seed=0)
    status_of(state, form, num_slots=1)
    retirable(state, list(real_run().store.objects))
    for ref in outer_entries_to_replay(state):
        assert state.cohort(ref.body.contributions).members
        assert all(state.members[c.replica].name for c in ref.body.contributions)
    for p in range(len(state.fragments)):
        here = dict.fromkeys(state.active, CONTRIBUTION)
        may_decide(state, p, here, 0, overlap_over=True, patience_over=True)
        of_the_run(state, p, here, dict.fromkeys(here, "0" * 16), 0, "0" * 16)
    if (data := real_run().store.objects.get(ENTRY.name(state.number))) is not None:
        opened = ENTRY.open(data, source_of(state.number))
        state.signer(opened.header)
        state.after(opened.header, sha256(data))


def resealed(word: str, value: dict, key: str) -> bytes:
    """A JSON value in our own form, signed as a kind of object by somebody who has the key."""
    line = json.dumps(value, separators=(",", ":")).encode()
    return object_of(line, FakeSigner(key).sign(word.encode() + b"\n" + line).encode())


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_no_changed_entry_is_accepted():
    log, rng = log_of(real_run()), generator()
    peak = peak_mebibytes()
    for _ in range(NUM_EXAMPLES):
        number = rng.randrange(len(log))
        if (data := mutated_bytes(log[number], rng)) != log[number]:
            with pytest.raises(LogError):
                accept(number, data)
    assert peak_mebibytes() < peak + 200


def test_a_member_can_write_no_entry_that_breaks_the_state():
    """Entries that are changed and signed again are refused, or an index can hold the state after them."""
    log, rng, num_accepted = log_of(real_run()), generator(), 0
    keys = [public_key(name) for name in ("creator", *real_run().names)]
    peak = peak_mebibytes()
    for _ in range(NUM_EXAMPLES):
        number = rng.randrange(len(log))
        value = mutated_json(json.loads(log[number].partition(b"\n")[0]), rng)
        try:
            state = accept(number, resealed("entry", value, rng.choice(keys)))
        except LogError:
            continue
        num_accepted += 1
        author = next((replica for replica, member in enumerate(state.members) if not member.fenced), None)
        if author is not None:
            made = Index(author=author, state=state)
            assert open_index(INDEX.seal(made, Signer()), state.number).header == made
    assert num_accepted < NUM_EXAMPLES / 4 + 20
    assert peak_mebibytes() < peak + 200


def test_no_changed_index_is_accepted():
    rng, numbers = generator(), index_numbers()
    real = {number: real_index(number) for number in (*numbers[:3], *numbers[:: len(numbers) // 8 + 1])}
    peak = peak_mebibytes()
    for _ in range(NUM_EXAMPLES):
        number = rng.choice(list(real))
        if (data := mutated_bytes(real[number], rng)) != real[number]:
            with pytest.raises(LogError):
                accept_index(number, data)
    assert peak_mebibytes() < peak + 200


def test_an_index_that_is_changed_and_signed_again_is_refused_or_can_be_read_on_from():
    rng, numbers = generator(), index_numbers()
    real = {number: real_index(number) for number in (*numbers[:3], *numbers[:: len(numbers) // 8 + 1])}
    keys = [public_key(name) for name in real_run().names]
    for _ in range(NUM_EXAMPLES):
        number = rng.choice(list(real))
        value = mutated_json(json.loads(real[number].partition(b"\n")[0]), rng)
        try:
            read_on(accept_index(number, resealed("index", value, rng.choice(keys))).state)
        except LogError:
            continue


@settings(settings.get_profile("hostile"))
@given(st.one_of(st.binary(max_size=400), st.text(max_size=200).map(str.encode)))
def test_random_bytes_are_no_entry_and_no_index(data):
    with pytest.raises(LogError):
        ENTRY.open(data, source_of(1))
    with pytest.raises(LogError):
        open_index(data, 1)


def create(**changes) -> bytes:
    value = json.loads(log_of(real_run())[0].partition(b"\n")[0])
    value["body"]["rules"] |= changes
    return resealed("entry", value, public_key("creator"))


BOMBS = {
    "deep": lambda: b'{"kind":' + b"[" * 1_000_000,
    "deep facts": lambda: b'{"kind":"create","author":-1,"body":{"facts":' + b'{"a":' * 100_000,
    "lists": lambda: b'{"kind":"create","author":-1,"body":{"facts":[' + b"[]," * (MOST_ENTRY_BYTES // 3),
    "digits": lambda: b'{"kind":"create","author":' + b"9" * 100_000 + b"}",
    "fragments": lambda: create(num_fragments=2**62),
    "stale": lambda: create(max_stale=2**62),
    "slots": lambda: create(num_slots=2**62),
    "shares": lambda: create(num_shares=2**62),
    "long": lambda: b"x" * (MOST_INDEX_BYTES + 1),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_bounded_memory(bomb):
    real_run()
    peak = peak_mebibytes()
    data = BOMBS[bomb]()
    with pytest.raises(LogError):
        accept(0, data)
    with pytest.raises(LogError):
        open_index(data, 0)
    assert peak_mebibytes() < peak + 300
