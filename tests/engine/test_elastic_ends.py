"""The end of a replica among others when something is wrong with it, while the others go on."""

import asyncio
import copy
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from obstore.exceptions import GenericError
from tests.engine.cases import inner_step
from tests.engine.test_elastic import counted, held_payloads, until
from tests.rendezvous.replicas import H, P, Replica, new_model
from torch import nn

import diloco
from diloco.cli.main import main
from diloco.errors import DilocoError, ExchangeError, UserError
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.contract import Offer
from diloco.rendezvous.log.keys import write_key
from diloco.rendezvous.replay import replayed
from diloco.rendezvous.store import Store, StoreError
from diloco.schedule import Sync


def ending(name: str, condition: Callable[[], bool], *replicas: Replica, seconds: float = 20.0) -> str:
    """Let the replicas step until one has ended, no other, and a condition holds; the sentence of that one."""
    sentences: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    while name not in sentences or not condition():
        assert time.monotonic() < deadline, f"it takes too long: {sentences}"
        for replica in replicas:
            if replica.exchange.name not in sentences:
                try:
                    replica.step()
                except DilocoError as error:
                    sentences[replica.exchange.name] = str(error)
                    replica.vanish()
        time.sleep(0.003)
    assert list(sentences) == [name], sentences
    return sentences[name]


def assert_sound(url: str | Path, *survivors: Replica, **settings) -> None:
    """The log can be replayed, and a replica that joins begins with what comes out."""
    for survivor in survivors:
        survivor.finish()
    replay = replayed(str(url), initial=lambda facts: dict(new_model().named_parameters()))
    joiner = Replica(str(url), name="joiner", **settings)
    joiner.vanish()
    assert replay.checked.steps and joiner.engine.outer_hash() == parameters_hash(replay.parameters())


MEMORY = {
    "outer": "outer parameters",
    "velocity": "outer rule's velocity",
    "error": "error of the error feedback",
    "sent error": "error of the error feedback",
}
FEEDBACK = {"patience": 100_000, "error_feedback": 1.0, "wire": "e3m0"}


def change_memory(replica: Replica, kind: str) -> None:
    if kind == "sent error":  # which becomes the error when the offer is counted
        replica.engine._membership._errors[0][0][0] += 1.0
    else:
        replica.engine._replica.state.use(kind, 0)[0] += 1.0


def assert_named(sentence: str, kind: str) -> None:
    name = MEMORY[kind]
    assert f"other bits in the {name} of fragment 0: this computer's memory changed; nothing was sent" in sentence


@pytest.mark.parametrize("kind", ["velocity", "error", "sent error"])
def test_a_replica_whose_memory_changed_ends(kind: str, tmp_path) -> None:
    ours = Replica(str(tmp_path), name="ours", **FEEDBACK)
    until(lambda: min(counted(ours)) >= 0, ours)
    until(lambda: 0 in ours.engine._membership.in_flight, ours)
    change_memory(ours, kind)
    assert_named(ending("ours", lambda: True, ours), kind)


def test_only_the_replica_whose_memory_changed_ends(tmp_path) -> None:
    a, b, c = members = [Replica(str(tmp_path), name=name, **FEEDBACK) for name in "abc"]
    until(lambda: min(min(counted(member)) for member in members) >= 0, *members)
    change_memory(c, "outer")
    rounds = a.rounds[0] + 3
    assert_named(ending("c", lambda: min(a.rounds[0], b.rounds[0]) >= rounds, *members), "outer")
    assert_sound(tmp_path, a, b, **FEEDBACK)


def gives_other_bits(replica: Replica) -> None:
    """Let a replica's outer steps of fragment 0 give other bits from now on."""
    ours = replica.engine._replica
    take = ours.take

    def other_take(sync: Sync, *arguments, **kind) -> None:
        take(sync, *arguments, **kind)
        if sync.fragment == 0:
            ours.state.use("outer", 0)[0] += 1.0

    ours.take = other_take


@pytest.mark.slow
def test_no_snapshot_holds_the_other_bits_of_an_entrys_author(tmp_path) -> None:
    settings = {"patience": 100_000, "snapshot_rounds": 4}
    a, b, c = members = [Replica(str(tmp_path), name=name, **settings) for name in "abc"]
    deciding = [
        (member.exchange._seated.log_thread, member.exchange._seated.log_thread._decision) for member in (a, b)
    ]
    for log_thread, _ in deciding:
        log_thread._decision = lambda: None
    until(lambda: c.rounds[0] == 3, *members)  # c writes one round after another, once it has taken the last
    gives_other_bits(c)
    until(lambda: c.rounds[0] == 4, *members)
    for log_thread, decision in deciding:
        log_thread._decision = decision
    ending("c", lambda: min(a.rounds[0], b.rounds[0]) > 5, *members)
    until(lambda: [kept.round for kept in a.exchange.state.fragments[0].snapshots] == [4], a, b)
    assert_sound(tmp_path, a, b)


def held_offers(replica: Replica, *, after: int) -> tuple[list[Offer], Callable[[], None]]:
    """Hold back a replica's payloads of fragment 0 that were taken after a round; the call lets them go."""
    seat = replica.engine._membership.joined.seat
    offer, held, arguments = seat.offer, list[Offer](), []

    def held_offer(one: Offer, *contents) -> None:
        if one.fragment == 0 and one.base_round > after:
            held.append(one)
            arguments.append((one, *contents))
        else:
            offer(one, *contents)

    def let_go() -> None:
        seat.offer = offer
        for several in arguments:
            offer(*several)

    seat.offer = held_offer
    return held, let_go


@pytest.mark.slow
def test_a_replica_with_other_bits_does_not_write_first_with_one_whose_payload_is_late(tmp_path) -> None:
    a, b, c = members = [Replica(str(tmp_path), name=name, patience=100_000) for name in "abc"]
    until(lambda: min(min(counted(member)) for member in members) >= 0, *members)
    held, let_go_of_a = held_offers(a, after=-1)
    until(lambda: held and b.rounds[0] == c.rounds[0] > held[0].base_round, *members)
    last_round = c.rounds[0]
    gives_other_bits(c)
    _, let_go_of_b = held_offers(b, after=last_round)
    until(lambda: min(member.rounds[0] for member in members) > last_round, *members)
    deciding = [
        (member.exchange._seated.log_thread, member.exchange._seated.log_thread._decision) for member in (a, b)
    ]
    for log_thread, _ in deciding:
        log_thread._decision = lambda: None
    let_go_of_a()
    # c has its own payload, and a's, which was taken against an older Θ: a majority.
    here = c.exchange._seated.log_thread.inbox.here[0]
    until(lambda: len(here) >= 2, *members)
    state, late = c.exchange.state, here[a.exchange.replica].contribution
    assert len(state.active) == 3 and late.base_round <= last_round and state.refusal(0, late) is None
    steps = c.engine.num_steps + 5 * H
    until(lambda: c.engine.num_steps >= steps, *members)
    assert c.exchange.state.fragments[0].round == last_round + 1
    for log_thread, decision in deciding:
        log_thread._decision = decision
    let_go_of_b()
    sentence = ending("c", lambda: min(a.rounds[0], b.rounds[0]) > last_round + 3, *members)
    assert "the outer parameters of fragment 0" in sentence and "other bits" in sentence
    assert_sound(tmp_path, a, b)


@pytest.mark.slow
def test_a_payload_that_was_taken_against_another_base_is_left_out(tmp_path, caplog) -> None:
    a, b = members = [Replica(str(tmp_path), name=name, patience=100) for name in "ab"]
    until(lambda: min(counted(b)) >= 0 and 0 not in b.engine._membership.in_flight, *members)
    b.exchange._seated.log_thread._decision = lambda: None
    b.engine._replica.state.use("outer", 0).add_(1.0)
    b.engine._membership._take_digests(0, ("outer",))
    seq = counted(b)[0]
    with caplog.at_level(logging.WARNING, "diloco"):
        goal = a.rounds[0] + 2
        sentence = ending("b", lambda: a.rounds[0] >= goal, *members)
    assert "before round" in sentence and "an outer step gave other bits, here or where" in sentence
    assert counted(b)[0] == seq
    left_out = "was taken against other outer parameters than the run's after round"
    assert sum(left_out in record.getMessage() for record in caplog.records) == 1
    assert_sound(tmp_path, a)


def test_a_revoked_key_ends_its_replica_and_says_so(tmp_path, monkeypatch) -> None:
    publics = [write_key(tmp_path / name) for name in "ab"]
    url = str(tmp_path / "run")
    monkeypatch.setenv("DILOCO_KEY", str(tmp_path / "a"))
    a = Replica(url, name="a")
    main(["keys", "allow", url, publics[1]])
    b = Replica(url, name="b", key=str(tmp_path / "b"))
    until(lambda: min(counted(b)) >= 0, a, b)
    main(["keys", "revoke", url, publics[1]])
    rounds = a.rounds[0]
    sentence = ending("b", lambda: a.rounds[0] > rounds + 1, a, b)
    assert sentence.endswith(": the key of b was revoked by the run's creator: this replica ends")
    a.finish()


def test_a_replica_whose_slot_was_given_away_says_so(tmp_path) -> None:
    a, b = Replica(str(tmp_path), name="a", num_slots=2), Replica(str(tmp_path), name="b")
    until(lambda: min(min(counted(a)), min(counted(b))) >= 0, a, b)
    until(lambda: not a.exchange.state.is_active(b.exchange.replica), a)
    c = Replica(str(tmp_path), name="c")
    assert c.exchange.slot == b.exchange.slot
    sentence = ending("b", lambda: min(counted(c)) >= 0, a, b, c)
    assert "b was in no outer step for long, and its slot of the text was given to c: start this" in sentence
    for replica in (a, c):
        replica.finish()


def test_a_snapshot_that_the_store_refuses_ends_its_replica_and_says_so(tmp_path, monkeypatch) -> None:
    create = Store.create

    async def refuse(self, name: str, data, **limits):
        if name.startswith("snapshots/"):
            raise StoreError(f"can't create {name}: permission denied")
        return await create(self, name, data, **limits)

    monkeypatch.setattr(Store, "create", refuse)
    ours = Replica(str(tmp_path), name="ours", snapshot_rounds=2)
    with pytest.raises(DilocoError, match=r"can't create snapshots/\d+/2-.*: permission denied"):
        until(lambda: False, ours)


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request reach a store any more."""

    async def lost(*arguments: object, **options: object) -> None:
        raise GenericError("Generic S3 error: HTTP error: error sending request")

    for name in ("_open", "_put"):
        monkeypatch.setattr(Store, name, lost)


def test_after_so_many_steps_without_the_store_a_replica_stops(tmp_path, monkeypatch) -> None:
    ours = Replica(str(tmp_path), name="ours", max_local_steps=40)
    until(lambda: min(counted(ours)) >= 0, ours)
    cut_off(monkeypatch)
    until(lambda: ours.exchange.store.outage is not None, ours)
    steps, theta = ours.engine.num_steps, ours.theta()
    with pytest.raises(
        DilocoError, match=r"error sending request, for \d+ s and 41 inner steps, more than max_local_steps=40: "
    ):
        until(lambda: False, ours)
    assert 40 <= ours.engine.num_steps - steps <= 43
    assert any((now != then).any() for now, then in zip(ours.theta(), theta, strict=True)), "it went on before"


def test_who_leaves_does_not_wait_for_a_store_that_is_gone(tmp_path, monkeypatch) -> None:
    ours = Replica(str(tmp_path), name="ours")
    until(lambda: min(counted(ours)) >= 0, ours)
    cut_off(monkeypatch)
    started = time.monotonic()
    with pytest.raises(ExchangeError, match=r"gave no answer within 0\.2 s"):
        ours.exchange.leave(seconds=0.2)
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_a_flush_that_comes_too_late_is_said_and_may_be_repeated(tmp_path) -> None:
    fast, slow = Replica(str(tmp_path), name="fast", patience=0), Replica(str(tmp_path), name="slow")
    membership = slow.engine._membership
    until(lambda: min(counted(slow)) >= 0 and not membership.in_flight, fast, slow)
    may_upload = held_payloads(slow)
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.warns(UserWarning, match="lack this replica's last work on fragment 0") as warned,
    ):
        flushed = thread.submit(slow.engine.finish, flush=True)
        until(lambda: set(membership.in_flight) == set(range(P)), fast)
        num_rounds = max(slow.rounds) + 5
        until(lambda: min(fast.rounds) >= num_rounds, fast)
        may_upload.set()
        until(flushed.done, fast)
        flushed.result()
    sentence = str(warned[0].message)
    assert all(f"fragment {p} (" in sentence for p in range(P)), sentence
    reason = (
        "it was made against round .*, and this is round .*|more than 3 outer steps came before its payload .*"
    )
    assert re.search(rf"fragment 0 \(({reason}): finish\(flush=True\) sends it again\)", sentence), sentence
    # The others are so far ahead that a payload against slow's Θ would be too late again.
    until(lambda: min(log.round for log in slow.exchange.state.fragments) > max(membership.rounds) + 5, fast)
    slow.engine.finish(flush=True)
    assert not membership.uncounted_fragments()
    fast.finish()
    slow.finish()


def test_replicas_that_train_on_the_same_text_are_refused(tmp_path) -> None:
    """Two of three, which end; the third may go on."""
    replicas = [Replica(str(tmp_path), name=name, quorum="all") for name in "abc"]
    training, messages = dict(enumerate(replicas)), list[str]()
    deadline = time.monotonic() + 20.0
    while len(messages) < 2:
        assert time.monotonic() < deadline, "it takes too long"
        for number, replica in tuple(training.items()):
            inner_step(replica.model, number % 2, replica.engine.num_steps + 1)
            try:
                replica.engine.step(tokens=8)
            except UserError as error:
                messages.append(str(error))
                training.pop(number)
        time.sleep(0.003)
    assert all("replicas 0 and 2 made the same outer gradients of all fragments" in each for each in messages)
    assert [*training] == [1]
    for replica in replicas:
        replica.vanish()


def test_a_fragment_without_gradients_may_be_equal_on_all_replicas(tmp_path) -> None:
    """As where AdamW decays weights that have no gradient; each fragment is long enough to be compared."""
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(40, 1) for _ in range(P))
    replicas = [Replica(str(tmp_path), name=name, quorum="all", model=copy.deepcopy(model)) for name in "ab"]
    decayed: list[diloco.OuterStep] = []
    deadline = time.monotonic() + 20.0
    while len(decayed) < 4:
        assert time.monotonic() < deadline, "it takes too long"
        for replica in replicas:
            before = [parameter.clone() for parameter in replica.model.blocks[0].parameters()]
            inner_step(replica.model, replica.exchange.replica, replica.engine.num_steps + 1)
            with torch.no_grad():
                for parameter, value in zip(replica.model.blocks[0].parameters(), before, strict=True):
                    parameter.copy_(0.99 * value)
            decayed += [one for one in replica.engine.step(tokens=8) if one.sync.fragment == 0]
    first, second = decayed[0].deltas
    assert torch.equal(first, second) and first.any(), "the test is of equal outer gradients"
    for replica in replicas:
        replica.vanish()


def test_an_outer_gradient_without_tokens_is_refused(tmp_path) -> None:
    replica = Replica(str(tmp_path))
    with pytest.raises(UserError, match=rf"step {H}: the last {H} inner steps read no token.*step\(tokens=...\)"):
        for t in range(1, H + 1):
            inner_step(replica.model, 0, t)
            replica.engine.step()
    replica.vanish()


def test_a_fresh_process_is_refused_where_all_wait_for_each_other(tmp_path) -> None:
    ours = Replica(str(tmp_path), name="ours", quorum="all")
    for _ in range(2 * H):
        ours.step()
    state, model = ours.engine.state_dict(), ours.model.state_dict()
    with pytest.raises(UserError, match="has sent outer gradients already: build a new engine"):
        ours.engine.load_state_dict(state)
    ours.vanish()
    fresh = Replica(str(tmp_path), name="fresh")
    with pytest.raises(UserError, match=r"\(quorum=all\) and has begun: .* load the state that this replica"):
        fresh.step()
    again = Replica(str(tmp_path), name="ours")
    again.model.load_state_dict(model)
    again.engine.load_state_dict(state)
    rounds = max(again.rounds) + 2
    until(lambda: min(again.rounds) >= rounds, again)
    again.finish()


@pytest.mark.parametrize(
    ("overlap_steps", "num_later", "num_alone"),
    [(1, 4, 0), (3, 0, 2), pytest.param(1, 0, P, marks=pytest.mark.slow)],
)
def test_a_replica_that_comes_back_takes_the_place_of_the_others(
    overlap_steps: int, num_later: int, num_alone: int, tmp_path
) -> None:
    """With the quorum "all", one at another place of the schedule and the others would wait for each other.

    It comes back with a state that it has saved before its last `num_later` steps, and has left while the others
    took `num_alone` outer steps, or was killed.
    """
    settings = {"quorum": "all", "overlap_steps": overlap_steps}
    ours, other = (Replica(str(tmp_path), name=name, first_target=n, **settings) for n, name in enumerate("ab"))
    in_turn(ours, other, num_steps=2 * H)
    model, state = copy.deepcopy(ours.model.state_dict()), ours.engine.state_dict()
    in_turn(ours, other, num_steps=num_later)
    if num_alone:
        ours.exchange.leave()
        num_rounds = sum(other.rounds) + num_alone
        until(lambda: sum(other.rounds) >= num_rounds, other)
    else:
        ours.vanish()
    again = Replica(str(tmp_path), name="a", **settings)
    again.model.load_state_dict(model)
    again.engine.load_state_dict(state)
    least = max(other.rounds) + 2

    def have_gone_on() -> bool:
        return min(*again.rounds, *other.rounds) >= least

    def go_on(replica: Replica) -> None:
        try:
            while not have_gone_on():
                replica.step()
        except ExchangeError:  # it waited for the other, which has ended
            assert have_gone_on()
        again.vanish()
        other.vanish()

    with ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(go_on, replica) for replica in (again, other)]:
            work.result()


def in_turn(*replicas: Replica, num_steps: int) -> None:
    """Let replicas that wait for each other take as many steps."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        for work in [pool.submit(lambda r=replica: [r.step() for _ in range(num_steps)]) for replica in replicas]:
            work.result()


def test_leaving_says_that_an_own_payload_is_not_in_the_store(tmp_path) -> None:
    replica, other = (Replica(str(tmp_path), name=name) for name in "ab")
    create = replica.exchange._store.create

    async def full_create(name: str, *arguments, **limits):
        if name.startswith("payloads/"):
            await asyncio.sleep(0.2)
            raise StoreError("No space left on device")
        return await create(name, *arguments, **limits)

    replica.exchange._store.create = full_create
    until(lambda: bool(replica.engine._membership.in_flight), replica, other)
    with pytest.raises(ExchangeError, match="No space left on device"):
        replica.exchange.leave()
    other.vanish()
