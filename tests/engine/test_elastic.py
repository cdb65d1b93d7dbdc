"""Replicas that come and go, in one process and step by step: conservation, errors, leaving, and resuming."""

import asyncio
import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rendezvous.replay import replayed
from tests.rendezvous.replicas import H, P, Replica, theta0

import diloco
from diloco.engine.elastic import ElasticMembership
from diloco.errors import ExchangeError, NonFiniteError, UserError
from diloco.rendezvous.contract import MOST_DECISIONS_PER_FRAGMENT, Decision
from diloco.rendezvous.objects import PAYLOAD

ALPHA, STRENGTH = 0.5, 0.7


def until(condition: Callable[[], bool], *replicas: Replica, seconds: float = 40.0) -> None:
    """Let the replicas step until a condition holds; more and more slowly, so that what is in flight may land."""
    deadline, pause_seconds = time.monotonic() + seconds, 0.003
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        for replica in replicas:
            replica.step()
        time.sleep(pause_seconds)
        pause_seconds *= 1.01


def counted(replica: Replica) -> list[int]:
    """The newest payload of a replica that the log has counted, by fragment; −1 for none."""
    return [log.last_seq.get(replica.exchange.replica, -1) for log in replica.exchange.state.fragments]


def held_payloads(replica: Replica) -> threading.Event:
    """Hold back a replica's payloads until the event is set."""
    create, may_upload = replica.exchange._store.create, threading.Event()

    async def held_create(name: str, data, **limits):
        while name.startswith("payloads/") and not may_upload.is_set():
            await asyncio.sleep(0.01)
        return await create(name, data, **limits)

    replica.exchange._store.create = held_create
    return may_upload


def uncounted(replica: Replica) -> list[np.ndarray]:
    """Θ − θ, by fragment."""
    return [outer_p - theta_p for outer_p, theta_p in zip(replica.outer(), replica.theta(), strict=True)]


class Notes(diloco.Nesterov):
    """Keeps its own outer gradient from a send to the outer step; then the slot is zeros on every replica."""

    @property
    def slots(self) -> tuple[str, ...]:
        return (*super().slots, "note")

    def on_send(self, fragment, own, sync, cohort) -> None:
        fragment.use("note").copy_(own())

    def on_average(self, fragment, average, sync, cohort) -> None:
        super().on_average(fragment, average, sync, cohort)
        fragment.use("note").zero_()


def test_a_rule_may_change_its_vectors_at_a_send(tmp_path) -> None:
    replica = Replica(str(tmp_path), outer=Notes())
    until(lambda: min(replica.rounds) >= 2, replica)
    assert not replica.engine._replica.state.use("velocity", 0).eq(0).all()
    replica.vanish()


def test_work_that_is_not_told_yet_survives_the_outer_steps_of_others(tmp_path) -> None:
    fast, slow = Replica(str(tmp_path), name="fast", patience=0), Replica(str(tmp_path), name="slow")
    sums = [np.zeros(len(theta_p)) for theta_p in theta0()]  # (Θ − θ) + own progress
    num_translated = num_counted = 0
    while num_translated < 12 or num_counted < 3:
        for _ in range(4):
            fast.step(pause_seconds=0.004)
        counts, before = list(slow.engine._membership.counted), slow.theta()
        moved = [np.copy(progress) for progress in slow.progress]
        steps = [outer_step.sync.fragment for outer_step in slow.step()]
        for p, (uncounted_p, progress) in enumerate(zip(uncounted(slow), slow.progress, strict=True)):
            if slow.engine._membership.counted[p] == counts[p]:
                np.testing.assert_allclose(uncounted_p + progress, sums[p], atol=2e-5)
                num_translated += steps.count(p)
                continue
            if steps.count(p) == 1:  # counted, and nothing else: the paper's merge
                theta_p = before[p] + (progress - moved[p])
                np.testing.assert_allclose(uncounted_p, ALPHA * (slow.outer()[p] - theta_p), atol=2e-5)
            num_counted += 1
            sums[p] = uncounted_p + progress
    assert max(np.abs(progress).max() for progress in slow.progress) > 0.1
    slow.finish()
    fast.finish()


def test_the_steps_in_flight_alone_are_compensated_whatever_others_outer_steps_move_meanwhile(tmp_path) -> None:
    settings = {"mixing": f"taylor:strength={STRENGTH}"}
    fast = Replica(str(tmp_path), name="fast", patience=0, **settings)
    slow = Replica(str(tmp_path), name="slow", **settings)
    membership, at_send, num_moved = slow.engine._membership, dict[int, tuple[np.ndarray, int]](), 0
    while num_moved < 4:
        for _ in range(3):
            fast.step(pause_seconds=0.004)
        flights, before, moved = dict(membership.in_flight), slow.theta(), [p.copy() for p in slow.progress]
        steps = [outer_step.sync.fragment for outer_step in slow.step()]
        for p, flight in flights.items():
            if steps.count(p) == 1 and membership.counted[p][1] == flight.step:  # not given up as too late
                progress, base_round = at_send[p]
                in_flight, tau = slow.progress[p] - progress, slow.engine.num_steps - flight.step
                outer_p, g = slow.outer()[p], -in_flight / tau
                sent = before[p] + (slow.progress[p] - moved[p]) - in_flight
                expected = outer_p - tau * (g + STRENGTH * g**2 * (outer_p - sent) / H)
                np.testing.assert_allclose(slow.theta()[p], expected, atol=2e-5)
                num_moved += slow.rounds[p] > base_round + 1
        for p, flight in membership.in_flight.items():
            if flights.get(p) is not flight:
                at_send[p] = slow.progress[p].copy(), slow.rounds[p]
    slow.finish()
    fast.finish()


def test_a_replica_that_was_counted_late_sends_with_the_others_again(tmp_path) -> None:
    fast, slow = Replica(str(tmp_path), name="fast", patience=0), Replica(str(tmp_path), name="slow")
    membership, num_late = slow.engine._membership, 0
    while num_late < 4:
        for _ in range(3):
            fast.step(pause_seconds=0.004)
        sent, step = dict(membership.in_flight), slow.engine.num_steps + 1
        for outer_step in slow.step():
            p, sync_round, sent_step = outer_step.sync
            if p in sent and sent_step == sent[p].step:  # it counts what was in flight
                is_late = sent[p].base_round < sync_round - 1
                assert membership._next_send[p] == (step if is_late else sent[p].step) + H
                num_late += is_late
    slow.finish()
    fast.finish()


def left_behind(folder: Path, *, num_rounds: int, **settings) -> tuple[Replica, Replica]:
    """A replica and another that takes no steps: as many decisions as may wait for it do."""
    settings = {"snapshot_rounds": 1000} | settings
    fast, slow = Replica(str(folder), name="fast", patience=0, **settings), Replica(str(folder), **settings)
    until(lambda: min(fast.rounds) >= 2 and min(slow.rounds) >= 2, fast, slow)
    last_round = max(slow.rounds) + num_rounds
    until(lambda: min(fast.rounds) >= last_round, fast)
    until(lambda: len(slow.exchange._seated.log_thread.decisions) >= MOST_DECISIONS_PER_FRAGMENT * P, fast)
    return fast, slow


def test_few_decisions_wait_for_a_replica_that_takes_no_steps_and_then_all_are_taken(tmp_path) -> None:
    # Each payload is downloaded again.
    fast, slow = left_behind(tmp_path, num_rounds=10, memory_bytes=1)
    waiting = slow.exchange._seated.log_thread.decisions
    assert len(waiting) == MOST_DECISIONS_PER_FRAGMENT * P, "as in a long evaluation"
    until(lambda: slow.rounds >= fast.rounds, slow)
    run = replayed(tmp_path, theta0())
    for p, number in enumerate(slow.rounds):
        np.testing.assert_array_equal(slow.outer()[p], run.outer[p][number])
    fast.finish()
    slow.finish()


def test_decisions_that_take_long_are_taken_one_an_inner_step_and_of_each_fragment_in_turn(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = left_behind(tmp_path, num_rounds=4)
    monkeypatch.setattr("diloco.engine.elastic._MOST_SECONDS", -1.0)
    taken = [[outer_step.sync.fragment for outer_step in slow.step()] for _ in range(2 * P)]
    assert max(map(len, taken)) == 1 and {p for fragments in taken for p in fragments} == {*range(P)}
    for replica in (fast, slow):
        replica.vanish()


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The fragments of which a replica has taken a snapshot in the place of outer steps."""
    fragments, jump = [], ElasticMembership._jump

    def noted(self: ElasticMembership, decision: Decision, *arguments) -> diloco.OuterStep:
        fragments.append(decision.fragment)
        return jump(self, decision, *arguments)

    monkeypatch.setattr(ElasticMembership, "_jump", noted)
    return fragments


def until_deleted(payload: Path, replica: Replica) -> None:
    """Let a replica step until a payload was uploaded, counted and deleted."""
    until(payload.exists, replica)
    until(lambda: not payload.exists(), replica)


@pytest.mark.slow
def test_who_was_away_for_long_takes_snapshots_and_keeps_its_own_work(tmp_path, jumps: list[int]) -> None:
    fast = Replica(str(tmp_path), name="fast", patience=0, snapshot_rounds=2)
    slow = Replica(str(tmp_path), name="slow")
    membership = slow.engine._membership
    until(lambda: min(counted(slow)) >= 0 and not membership.in_flight, fast, slow)
    # More outer steps than wait for it have lost their payloads.
    num_waiting = MOST_DECISIONS_PER_FRAGMENT * P + 4 * P
    until_deleted(tmp_path / PAYLOAD.name(0, fast.engine._membership.next_seq + num_waiting), fast)
    while any(map(int.__lt__, slow.rounds, fast.rounds)):
        counts, num_jumps, uncounted_then = list(membership.counted), len(jumps), uncounted(slow)
        moved = [np.copy(progress) for progress in slow.progress]
        slow.step()
        for p in jumps[num_jumps:]:
            assert membership.counted[p] == counts[p]
            expected = uncounted_then[p] + moved[p] - slow.progress[p]
            np.testing.assert_allclose(uncounted(slow)[p], expected, atol=1e-4)
    assert set(jumps) == set(range(P))
    until(lambda: slow.rounds == fast.rounds, fast, slow)
    for slow_p, fast_p in zip(slow.outer(), fast.outer(), strict=True):
        np.testing.assert_array_equal(slow_p, fast_p)
    seqs = counted(slow)
    until(lambda: min(map(int.__sub__, counted(slow), seqs)) > 0, fast, slow)
    fast.finish()
    slow.finish()


@pytest.mark.slow
def test_a_payload_that_was_counted_during_a_long_absence_is_told_once(tmp_path, jumps: list[int]) -> None:
    settings = {"snapshot_rounds": 2, "max_stale": 1000, "mixing": "taylor:strength=0"}
    fast = Replica(str(tmp_path), name="fast", patience=0, **settings)
    slow = Replica(str(tmp_path), name="slow", **settings)
    membership = slow.engine._membership
    until(lambda: min(counted(slow)) >= 0 and not membership.in_flight, fast, slow)
    may_upload = held_payloads(slow)
    until(lambda: 0 in membership.in_flight, slow)
    flight, then, progress = membership.in_flight[0], membership.counted[0][0], slow.progress[0].copy()
    num_rounds = max(slow.rounds) + 12
    until(lambda: min(fast.rounds) >= num_rounds, fast)
    may_upload.set()
    until(lambda: fast.exchange.state.fragments[0].last_seq.get(1) == flight.seq, fast)
    together = fast.exchange.state.fragments[0].since[-1].body.contributions
    assert [counted.replica for counted in together] == [0, 1]
    until_deleted(tmp_path / PAYLOAD.name(0, together[0].seq), fast)
    until(lambda: 0 in jumps, slow)
    assert membership.counted[0] == (then + flight.tokens, flight.step)
    assert membership.in_flight.get(0) is not flight
    np.testing.assert_allclose(uncounted(slow)[0] + slow.progress[0], progress, atol=1e-4)
    fast.finish()
    slow.finish()


@pytest.mark.parametrize("combine", ["gather", pytest.param("reduce_scatter", marks=pytest.mark.slow)])
def test_the_error_of_error_feedback_changes_when_a_payload_is_counted_and_then_only(combine, tmp_path) -> None:
    settings = {"error_feedback": 0.5, "wire": "e3m0", "combine": combine}
    ours = Replica(str(tmp_path), name="ours", num_replicas=1, **settings)
    silent = Replica(str(tmp_path), name="silent", **settings)  # a majority needs it
    errors = [np.zeros_like(theta_p) for theta_p in theta0()]
    changes, deadline = [], time.monotonic() + 20
    while len(changes) < 16 * P or sum(changes) < 3:
        assert time.monotonic() < deadline
        counts = list(ours.engine._membership.counted)
        ours.step(pause_seconds=0.004)
        for p in range(P):
            error = ours.engine._replica.state.use("error", p).numpy()
            is_counted = ours.engine._membership.counted[p] != counts[p]
            assert np.array_equal(error, errors[p]) != is_counted
            errors[p] = error.copy()
            changes.append(is_counted)
    assert 3 <= sum(changes) < len(changes) / 4
    ours.finish()
    silent.vanish()


def test_a_replica_leaves_and_comes_back_with_the_text_where_it_stood(tmp_path) -> None:
    first = Replica(str(tmp_path), name="home", snapshot_rounds=1000)  # the replay reads all
    until(lambda: min(counted(first)) >= 0, first)
    first.finish()
    position = first.exchange.state.positions[0]
    second = Replica(str(tmp_path), name="home")
    assert (second.exchange.replica, second.exchange.slot) == (1, first.exchange.slot)
    assert second.exchange.start == position > 0
    assert all(map(np.array_equal, second.outer(), first.outer()))
    assert all(map(np.array_equal, second.theta(), first.outer()))
    until(lambda: min(counted(second)) >= 0, second)
    second.finish()
    run = replayed(tmp_path, theta0())
    assert all(np.array_equal(outer_p, run.outer[p][-1]) for p, outer_p in enumerate(second.outer()))


def test_everything_restarts_from_the_log_after_all_were_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("diloco.rendezvous.log.index.retirable", lambda state, names: [])  # the replay reads all
    killed = [Replica(str(tmp_path), name=name, snapshot_rounds=2) for name in "ab"]
    until(lambda: min(min(counted(replica)) for replica in killed) >= 2 * P, *killed)
    for replica in killed:
        replica.vanish()
    again = [Replica(str(tmp_path), name=name) for name in "ab"]
    until(lambda: min(min(counted(replica)) for replica in again) >= 0, *again)
    for replica in again:
        replica.finish()
    run = replayed(tmp_path, theta0())
    for replica in again:
        for p, outer_p in enumerate(replica.outer()):
            np.testing.assert_array_equal(outer_p, run.outer[p][replica.rounds[p]])


@pytest.mark.parametrize("when", ["nothing_counted_since", "counted_since", "counted_and_not_merged"])
def test_a_checkpoint_resumes_without_telling_work_twice(when: str, tmp_path) -> None:
    tau = 4 if when == "counted_and_not_merged" else 1
    ours = Replica(str(tmp_path), name="ours", overlap_steps=tau, snapshot_rounds=1000)  # the replay reads all
    membership = ours.engine._membership
    until(lambda: min(counted(ours)) >= 0 and (tau == 4 or not membership.in_flight), ours)
    if tau == 4:
        until(lambda: 0 in membership.in_flight, ours)
        seq, deadline = membership.in_flight[0].seq, time.monotonic() + 10
        while counted(ours)[0] < seq:  # alone, it decides at once; it merges at t + τ
            assert time.monotonic() < deadline
            time.sleep(0.002)
    state, theta = copy.deepcopy(ours.engine.state_dict()), copy.deepcopy(ours.model.state_dict())
    uncounted_then, pending = uncounted(ours), {p: flight.seq for p, flight in membership.in_flight.items()}
    if when == "counted_since":
        before = counted(ours)
        until(lambda: min(map(int.__sub__, counted(ours), before)) > 0, ours)
    ours.vanish()
    resumed = Replica(str(tmp_path), name="ours", overlap_steps=tau)
    resumed.model.load_state_dict(theta)
    resumed.engine.load_state_dict(state)
    uncounted_tokens = resumed.engine._membership.uncounted_tokens
    resumed.engine.step()  # an inner step without progress
    pairs = {(c["fragment"], c["seq"]) for c in replayed(tmp_path, theta0()).contributions if c["replica"] == 0}
    are_counted = [when == "counted_since" or (p, pending.get(p)) in pairs for p in range(P)]
    assert are_counted[0] == (when != "nothing_counted_since")
    for uncounted_p, then_p, is_counted in zip(uncounted(resumed), uncounted_then, are_counted, strict=True):
        np.testing.assert_allclose(uncounted_p, 0 * then_p if is_counted else then_p, atol=1e-6)
    rest = [
        state["tokens"] - n
        for (n, _), is_counted in zip(state["counted"], are_counted, strict=True)
        if not is_counted
    ]
    assert uncounted_tokens == resumed.engine._membership.uncounted_tokens == sum(rest) / P
    resumed.finish()


@pytest.mark.parametrize("slot", ["own", "given_away"])
def test_a_state_that_is_saved_again_before_the_next_step_is_the_one_that_was_loaded(slot, tmp_path) -> None:
    settings = {"error_feedback": 0.5, "wire": "e3m0", "sync_every": 20}
    ours = Replica(str(tmp_path), name="ours", num_slots=2, **settings)
    until(lambda: min(counted(ours)) >= 0, ours)
    ours.engine._membership._next_send = [1 << 30] * P  # no more is sent
    until(lambda: not ours.engine._membership.in_flight, ours)
    ours.step()
    assert not ours.engine._membership.in_flight
    state, model = copy.deepcopy(ours.engine.state_dict()), copy.deepcopy(ours.model.state_dict())
    theta, outer_then = ours.theta(), ours.outer()
    ours.vanish()
    other = Replica(str(tmp_path), name="other", patience=0, **settings)
    until(lambda: min(map(int.__sub__, other.rounds, state["rounds"])) > 0, other)
    other.vanish()
    if slot == "given_away":
        state["slot"] = 1
    for _ in range(2):
        again = Replica(str(tmp_path), name="ours", **settings)
        again.model.load_state_dict(model)
        again.engine.load_state_dict(state)
        saved, model = copy.deepcopy(again.engine.state_dict()), copy.deepcopy(again.model.state_dict())
        for kind in ("outer", "error"):
            assert all(map(torch.equal, saved.pop(kind).values(), state[kind].values()))
        assert saved == {name: value for name, value in state.items() if name in saved}
        state = copy.deepcopy(again.engine.state_dict())
        again.vanish()
    last = Replica(str(tmp_path), name="ours", **settings)
    last.model.load_state_dict(model)
    last.engine.load_state_dict(state)
    last.engine.step()  # an inner step without progress
    assert all((now != then).all() for now, then in zip(last.outer(), outer_then, strict=True))
    for p, outer_p in enumerate(last.outer()):
        expected = theta[p] + (outer_p - outer_then[p]) if slot == "own" else outer_p
        np.testing.assert_array_equal(last.theta()[p], expected)
    assert last.engine.state_dict()["rounds"] == last.rounds
    last.vanish()


def test_a_state_of_another_run_is_refused(tmp_path) -> None:
    ours, other = (Replica(str(tmp_path / name), name="ours") for name in ("one", "two"))
    with pytest.raises(UserError, match="not that of a replica of this run"):
        ours.engine.load_state_dict(other.engine.state_dict())
    ours.vanish()
    other.vanish()


WRONG = {
    "no tensors by parameter name as outer": lambda state: {"outer": None},
    r"outer of .* is \(3,\) in torch.float32, and here": lambda state: {
        "outer": dict.fromkeys(state["outer"], torch.zeros(3))
    },
    "the state lacks .* in outer": lambda state: {"outer": dict([*state["outer"].items()][1:])},
    "the state has .* in error, which": lambda state: {"error": state["outer"]},
    "num_steps: expected int, got str": lambda state: {"num_steps": "7"},
    "tokens: expected int >= 0": lambda state: {"tokens": -1},
    "the state has 1 values as counted, and there are": lambda state: {"counted": [[0, 0]]},
    "counted.*: expected array, got int": lambda state: {"counted": [0] * P},
}


def test_a_state_of_this_run_that_is_damaged_is_refused_and_names_what_is_wrong(tmp_path) -> None:
    ours = Replica(str(tmp_path), name="ours")
    state = ours.engine.state_dict()
    for sentence, change in WRONG.items():
        with pytest.raises(UserError, match=sentence):
            ours.engine.load_state_dict(state | change(state))
    for key in state.keys() - {"run"}:
        with pytest.raises(UserError, match=f"^the state .*{key}"):
            ours.engine.load_state_dict({name: value for name, value in state.items() if name != key})
    ours.engine.load_state_dict(state)
    ours.vanish()


def test_an_outer_gradient_that_no_run_can_add_up_is_not_sent(tmp_path, monkeypatch) -> None:
    ours = Replica(str(tmp_path), name="ours")
    monkeypatch.setattr("diloco.rendezvous.objects.MOST_NORM", 1e-9)
    with pytest.raises(
        NonFiniteError, match=r"^step \d+: the outer gradient of fragment 0 has the norm .*, and the run"
    ):
        until(lambda: False, ours)


def test_the_later_process_of_a_name_ends_the_earlier_one(tmp_path) -> None:
    first = Replica(str(tmp_path), name="home")
    until(lambda: min(counted(first)) >= 0, first)
    second = Replica(str(tmp_path), name="home")
    with pytest.raises(
        ExchangeError, match="another process has joined the run as home, and goes on in the place"
    ):
        until(lambda: False, first)
    until(lambda: min(counted(second)) >= 0, second)
    second.finish()


def test_with_the_quorum_all_a_missing_replica_ends_the_wait_with_one_sentence(tmp_path) -> None:
    ours = Replica(str(tmp_path), name="ours", quorum="all")
    missing = Replica(str(tmp_path), name="missing")
    missing.vanish()
    ours.exchange._seated._timeout_seconds = 1.0
    with pytest.raises(ExchangeError, match=r"no decision about fragment 0 came within 1 s: see with"):
        for _ in range(20):
            ours.step()
    assert ours.exchange._seated.log_thread.overlap_seconds == 0, "it looks often while training waits"


@pytest.mark.slow
def test_a_replica_with_a_long_overlap_looks_seldom_for_payloads_that_do_not_come(tmp_path, monkeypatch) -> None:
    ours, other = Replica(str(tmp_path), name="ours"), Replica(str(tmp_path), name="other")
    until(lambda: min(min(counted(ours)), min(counted(other))) >= 0, ours, other)
    thread, asked = ours.exchange._seated.log_thread, list[str]()
    get = thread._store.get

    async def counting(name: str, **settings):
        asked.append(name)
        return await get(name, **settings)

    monkeypatch.setattr(thread._store, "get", counting)
    thread.overlap_seconds = 8.0  # so at most a second passes between two looks
    time.sleep(2.5)
    assert sum(name.startswith("payloads/") for name in asked) < 15, "with polls of 4 ms there were 600"
    rounds = min(ours.rounds) + 1
    until(lambda: min(ours.rounds) >= rounds and min(counted(other)) >= 0, ours, other)
    ours.finish()
    other.finish()


def test_the_pace_is_that_of_the_last_steps_whatever_came_before(tmp_path) -> None:
    ours = Replica(str(tmp_path))
    seat, taken_rounds = ours.exchange._seated, [(0, 0)] * P
    time.sleep(0.3)  # before the first step, as compiling does
    for step in (*range(1, 4), *range(1000, 1010)):  # a checkpoint was loaded between
        seat.step(step, taken_rounds, room=0)
        time.sleep(0.01)
    assert 0.01 <= seat._step_seconds < 0.1
    ours.vanish()
