"""Every outer rule and merge rule against its equation in NumPy, on two processes; and their limits."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, outer_of, theta_of
from tests.engine.test_default_dtype import default_dtype
from tests.engine.test_elastic import until
from tests.processes import run_replicas
from tests.rendezvous.replay import chain
from tests.rendezvous.replay import replayed as numpy_replay
from tests.rendezvous.replicas import Replica, new_model, theta0

import diloco
from diloco.errors import UserError
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.digest import outer_digest
from diloco.outer.merge import MERGE_RULES
from diloco.outer.rda import RDA
from diloco.outer.rule import FragmentState, Span
from diloco.outer.rules import RULES, outer_rule, rule_of_facts
from diloco.rendezvous.replay import replayed
from diloco.schedule import Sync

f32 = np.float32
CASE = Case(P=2, H=4, tau=2, wire="int8", layers_per_fragment=2)
STEPS, SAVED = 25, 14
PLAIN = "blocks.3"
ETA, MU = 0.5, 0.8
RULE_SPECS = {
    "sgd": "sgd:lr=0.5",
    "nesterov": "nesterov:lr=0.5,momentum=0.8",
    "restarted": "nesterov:lr=0.5,momentum=0.8,restart_every=2",
    "decayed": "nesterov:lr=0.5,momentum=0.8,decay_rounds=3,final=0.25",
    "rda": f"rda:lr=0.5,momentum=0.8,plain={PLAIN}",
    "delayed_nesterov": "delayed_nesterov:lr=0.5,momentum=0.8,delay=2,activation=0.25",
    "eager": "eager:lr=0.5,momentum=0.8",
    "ties": "ties:lr=0.5,momentum=0.8",
    "torch": "torch.Adam:lr=0.1,betas=0.8+0.9",
}
"""Spellings; those with the same name as a rule of the registry test that rule."""
MERGES = {"rda": "taylor:strength=0.7", "eager": "translate", "delayed_nesterov": "overwrite"}
"""The merge rules of some; the others mix with α = 0.25."""


class Step(NamedTuple):
    """An outer step; vectors are of one fragment."""

    fragment: int
    round: int
    sent: int
    taken: int
    deltas: list[np.ndarray]
    Theta: np.ndarray
    """Θ after it."""


class Trained(NamedTuple):
    steps: list[Step]
    thetas: list[tuple[np.ndarray, np.ndarray]]
    """θ before and after what the engine did at each inner step."""
    Thetas: list[np.ndarray]
    places: list[dict[str, Span]]
    saved: io.BytesIO
    """The state in the midst of a flight."""


def vectors_of(flat: np.ndarray) -> list[np.ndarray]:
    sizes = [sum(span.stop - span.start for span in part.values()) for part in places()]
    return np.split(flat, np.cumsum(sizes)[:-1])


def places() -> list[dict[str, Span]]:
    parts = []
    for fragment in diloco.sequential(model := CASE.model(), layers_per_fragment=2):
        spans, start = {}, 0
        for name in fragment.parameters:
            spans[name] = Span(tuple(model.get_parameter(name).shape), start)
            start = spans[name].stop
        parts.append(spans)
    return parts


def advance(engine, model, last: int, result: Trained) -> None:
    """Train up to a step, and note what happens."""
    for t in range(engine.num_steps + 1, last + 1):
        inner_step(model, dist.get_rank(), t)
        before = theta_of(model)
        taken = engine.step()
        Theta = vectors_of(outer_of(engine))
        for step in taken:
            deltas = [delta_N.numpy().copy() for delta_N in step.deltas]
            p = step.sync.fragment
            result.steps.append(Step(p, step.sync.round, step.sync.step, t, deltas, Theta[p]))
        result.thetas.append((before, theta_of(model)))
        result.Thetas.append(outer_of(engine))


def engine_of(name: str, model):
    return CASE.engine(model, outer=RULE_SPECS[name], mixing=MERGES.get(name, 0.25))


def trained(name: str) -> Trained:
    """A run with a rule."""
    engine = engine_of(name, model := CASE.model())
    result = Trained([], [], [outer_of(engine)], places(), io.BytesIO())
    advance(engine, model, SAVED, result)
    state = {"engine": engine.state_dict(), "model": model.state_dict()}
    assert state["engine"]["in_flight"]
    torch.save(state, result.saved)
    result.saved.seek(0)
    advance(engine, model, STEPS, result)
    engine.finish()
    return result


def all_trained() -> dict[str, Trained]:
    return {name: trained(name) for name in RULE_SPECS}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Trained]]:
    """The runs of both replicas by name."""
    replicas = run_replicas(all_trained, 2)
    return {name: [replica[name] for replica in replicas] for name in RULE_SPECS}


def all_gone_on(saved: dict[str, list[io.BytesIO]]) -> dict[str, Trained]:
    """The rest of each run, in another process."""
    runs = {}
    for name, states in saved.items():
        engine = engine_of(name, model := CASE.model())
        state = torch.load(states[dist.get_rank()])
        model.load_state_dict(state["model"])
        engine.load_state_dict(state["engine"])
        advance(engine, model, STEPS, result := Trained([], [], [], [], io.BytesIO()))
        engine.finish()
        runs[name] = result
    return runs


@pytest.fixture(scope="module")
def resumed(runs) -> dict[str, list[Trained]]:
    """The same runs, gone on from what they had saved."""
    replicas = run_replicas(all_gone_on, 2, {name: [run.saved for run in both] for name, both in runs.items()})
    return {name: [replica[name] for replica in replicas] for name in RULE_SPECS}


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x) if x.any() else x


def radial(deltas: list[np.ndarray], spans: dict[str, Span]) -> np.ndarray:
    """The average length along the average direction, for matrices; the average of others."""
    result = np.mean(deltas, axis=0)
    for name, span in spans.items():
        parts = [delta[span.start : span.stop].astype(np.float64) for delta in deltas]
        if len(span.shape) > 1 and PLAIN not in name:
            radius = np.mean([np.linalg.norm(part) for part in parts])
            result[span.start : span.stop] = radius * unit(np.mean([unit(part) for part in parts], axis=0))
    return result


def expected_step(name: str, Theta: np.ndarray, state: dict, step: Step, spans: dict[str, Span]) -> np.ndarray:
    """Θ after an outer step, from Θ before it and a fragment's state, which is changed."""
    D = np.mean(step.deltas, axis=0)
    v, b, eta, mu = state.get("v", 0 * D), state.get("b", 0 * D), ETA, MU
    if name == "ties":
        s = np.sign(np.sum(step.deltas, axis=0))
        agree = [np.where(np.sign(delta) == s, delta, 0) for delta in step.deltas]
        D = np.sum(agree, axis=0) / np.maximum(1, np.sum([a != 0 for a in agree], axis=0))
    if name == "torch":
        state["m"] = 0.8 * state.get("m", 0) + 0.2 * D
        state["s"] = 0.9 * state.get("s", 0) + 0.1 * D**2
        r = step.round
        return Theta - 0.1 * state["m"] / (1 - 0.8**r) / (np.sqrt(state["s"] / (1 - 0.9**r)) + 1e-8)
    if name == "delayed_nesterov":
        b, c, n = b + D, 0.25, 2
        if step.round % 2 == 0:
            state["v"], state["b"] = mu * v + b / n, 0 * b
            return Theta - eta * ((1 - c * n + c) * mu * state["v"] + D / n)
        state["b"] = b
        return Theta - eta * (c * mu * v + D / n)
    mu = 0.0 if name == "sgd" else mu
    v = 0 * v if name == "restarted" and step.round in (1, 3, 5) else v
    eta = {1: 0.5, 2: 0.5 * 0.625}.get(step.round, 0.5 * 0.25) if name == "decayed" else eta
    D = radial(step.deltas, spans) if name == "rda" else D
    state["v"] = mu * v + D
    return Theta - eta * (D + mu * state["v"])


@pytest.mark.parametrize("name", RULE_SPECS)
def test_each_outer_step_is_the_rules_equation(runs, name):
    for run in runs[name]:
        Theta, states = vectors_of(run.Thetas[0]), [{}, {}]
        assert len(run.steps) >= 9 and max(step.round for step in run.steps) >= 4
        for step in run.steps:
            p = step.fragment
            Theta[p] = expected_step(name, Theta[p].astype(np.float64), states[p], step, run.places[p])
            np.testing.assert_allclose(step.Theta, Theta[p], rtol=2e-5, atol=2e-6)
    first, second = runs[name]
    same = [a.Theta.tobytes() == b.Theta.tobytes() for a, b in zip(first.steps, second.steps, strict=True)]
    assert all(same) == (name != "eager"), "shared rules have the same bits on all replicas"


@pytest.mark.slow
@pytest.mark.parametrize("name", RULE_SPECS)
def test_new_processes_go_on_from_the_states_bit_for_bit(runs, resumed, name):
    for run, rest in zip(runs[name], resumed[name], strict=True):
        assert len(rest.Thetas) == STEPS - SAVED
        for kept, again in zip(run.Thetas[-len(rest.Thetas) :], rest.Thetas, strict=True):
            assert kept.tobytes() == again.tobytes()
        for kept, again in zip(run.thetas[SAVED:], rest.thetas, strict=True):
            assert np.array_equal(kept, again)


@pytest.mark.parametrize("name", RULE_SPECS)
def test_each_merge_is_the_rules_equation(runs, name):
    for run in runs[name]:
        for step in run.steps:
            p, tau = step.fragment, step.taken - step.sent
            before, after = (vectors_of(theta)[p] for theta in run.thetas[step.taken - 1])
            sent = vectors_of(run.thetas[step.sent - 1][0])[p]
            Theta, Theta_then = step.Theta, vectors_of(run.Thetas[step.taken - 1])[p]
            g = (sent - before) / tau
            expected = {
                "rda": Theta - tau * (g + 0.7 * g**2 * (Theta - sent) / CASE.H),
                "eager": before + Theta - Theta_then,
                "delayed_nesterov": Theta,
            }.get(name, 0.25 * before + 0.75 * Theta)
            np.testing.assert_allclose(after, expected, rtol=2e-5, atol=2e-6)


def test_an_eager_replica_goes_on_from_its_own_part_of_the_outer_step(runs):
    for rank, run in enumerate(runs["eager"]):
        for step in run.steps[:2]:  # before them v = 0
            Theta, theta = vectors_of(run.Thetas[step.sent]), vectors_of(run.thetas[step.sent - 1][1])
            own = step.deltas[rank] / 2
            expected = vectors_of(run.Thetas[0])[step.fragment] - ETA * (1 + MU) * own
            np.testing.assert_allclose(Theta[step.fragment], expected, rtol=1e-5, atol=1e-6)
            assert np.array_equal(theta[step.fragment], Theta[step.fragment])


def alone(outer: str, *, mixing: str | None = None, **changes) -> tuple[bytes, bytes]:
    """θ and Θ of one replica after some steps."""
    case = Case(P=2, H=4, **{"tau": 0, "alpha": 0.0, **changes})
    model, mixing = case.model(), "translate" if "eager" in outer else mixing
    engine = case.engine(model, outer=outer, **({} if mixing is None else {"mixing": mixing}))
    for t in range(1, 18):
        inner_step(model, 0, t)
        engine.step()
    engine.finish()
    return theta_of(model).tobytes(), outer_of(engine).tobytes()


@pytest.mark.parametrize(
    ("outer", "other"),
    [
        ("delayed_nesterov:delay=1", "nesterov"),
        ("sgd:lr=0.4", "nesterov:lr=0.4,momentum=0"),
        ("nesterov:restart_every=1,momentum=0.5", "nesterov:lr=0.6,momentum=0"),
        ("nesterov:restart_every=99", "nesterov"),
        ("nesterov:restart_with_members=true", "nesterov"),
        ("nesterov:decay_rounds=9,final=1", "nesterov"),
        ("rda", "nesterov"),
        ("rda:plain=weight", "nesterov"),
        ("ties", "nesterov"),
        ("torch.SGD:lr=0.4,momentum=0.9,nesterov=true", "nesterov"),
    ],
)
def test_limits_of_a_rule_are_other_rules(outer, other):
    for one, two in zip(alone(outer, tau=2), alone(other, tau=2), strict=True):
        np.testing.assert_allclose(np.frombuffer(one, f32), np.frombuffer(two, f32), rtol=1e-5, atol=1e-6)


def test_a_replica_alone_that_keeps_its_steps_in_flight_trains_as_if_there_were_no_outer_steps():
    expected = Case(P=2, H=4).model()
    for t in range(1, 18):
        inner_step(expected, 0, t)
    for tau in (1, 3):
        theta, _ = alone("sgd:lr=1", mixing="taylor:strength=0", tau=tau, wire="fp32")
        np.testing.assert_allclose(np.frombuffer(theta, f32), theta_of(expected), rtol=1e-4, atol=1e-5)


def test_an_eager_replica_alone_is_nesterov_without_overlap_to_the_last_bit():
    assert alone("eager", tau=0) == alone("nesterov", tau=0)
    one, two = (np.frombuffer(alone(*how)[1], f32) for how in (("eager",), ("nesterov",)))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("name", ["nesterov", "delayed_nesterov", "rda", "eager", "ties"])
def test_the_pieces_of_a_vector_change_no_bit(name):
    rule, cohort = outer_rule(RULE_SPECS[name]), Cohort((0, 1), (1.0, 0.5))
    ends = []
    for most in (100, 7):
        vectors = {
            slot: torch.randn(30, generator=torch.Generator().manual_seed(9)) for slot in ("outer", *rule.slots)
        }
        deltas = torch.randn(2, 30, generator=torch.Generator().manual_seed(3))
        fragment = FragmentState(vectors.__getitem__, {"matrix": Span((2, 10), 0), "vector": Span((10,), 20)})
        average = Average(deltas[0] + 0.5 * deltas[1], 1.5, lambda deltas=deltas: iter(deltas))
        with ExitStack() as stack:
            for module in {type(rule).__module__, "diloco.outer.nesterov"}:
                stack.enter_context(patch(f"{module}.elements_at_once", return_value=most))
            rule.on_send(fragment, lambda deltas=deltas: deltas[0], Sync(0, 2, 8), cohort)
            rule.on_average(fragment, average, Sync(0, 2, 8), cohort)
        ends.append(vectors)
    assert all(torch.equal(ends[0][slot], ends[1][slot]) for slot in ends[0])


def test_rda_of_equal_vectors_is_their_mean_and_of_opposite_ones_0():
    spans, delta_N = {"weight": Span((2, 3), 0), "bias": Span((2,), 6)}, torch.arange(1.0, 9.0)
    rule, cohort = RDA(lr=1.0, momentum=0.0), Cohort((0, 1), (0.5, 1.0))
    opposite_N = torch.cat([torch.zeros(6), -delta_N[6:] / 3])
    for factor, expected_N in ((1.0, delta_N), (-1.0, opposite_N)):
        vectors, deltas = {"outer": torch.zeros(8), "velocity": torch.zeros(8)}, (delta_N, factor * delta_N)
        average = Average(0.5 * deltas[0] + deltas[1], 1.5, lambda deltas=deltas: iter(deltas))
        equal = cohort if factor == 1 else Cohort.equal(2)
        rule.on_average(FragmentState(vectors.__getitem__, spans), average, Sync(0, 1, 1), equal)
        torch.testing.assert_close(-vectors["outer"], expected_N)


@pytest.mark.parametrize("seed", range(4))
def test_rda_has_the_same_bits_however_the_parameters_are_cut(seed):
    cohort, generator = Cohort((0, 1), (1.0, 0.5)), torch.Generator().manual_seed(seed)
    deltas = torch.randn(2, 30, 100, generator=generator)

    def stepped(rows: slice, add_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        own, vectors = deltas[:, rows].flatten(1), {}
        total_N = own[0] + 0.5 * own[1]
        use = lambda slot: vectors.setdefault(slot, torch.zeros_like(total_N))  # noqa: E731
        fragment = FragmentState(use, {"weight": Span((total_N.numel() // 100, 100), 0)}, add_up)
        RDA().on_average(fragment, Average(total_N, 1.5, lambda: iter(own)), Sync(0, 1, 1), cohort)
        return vectors["outer"]

    cuts, values = (slice(0, 7), slice(7, 30)), {}
    everyone = Barrier(len(cuts))

    def add_up(index: int, own: torch.Tensor) -> torch.Tensor:
        everyone.wait(10)
        values[index] = own
        everyone.wait(10)
        return values[0] + values[1]

    with ThreadPoolExecutor(len(cuts)) as pool:
        parts = pool.map(lambda index: stepped(cuts[index], partial(add_up, index)), range(len(cuts)))
        assert torch.equal(torch.cat([*parts]), stepped(slice(30), lambda values: values))


@pytest.mark.parametrize("name", RULE_SPECS)
def test_torchs_default_dtype_changes_no_bit(name):
    rule, deltas, cohort = outer_rule(RULE_SPECS[name]), torch.randn(3, 12), Cohort((0, 1, 2), (1.0, 0.3, 0.7))
    total_N, made = (deltas * torch.tensor(cohort.weights)[:, None]).sum(0), []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        vectors = {kind: torch.zeros(12) for kind in ("outer", *rule.slots)}
        with default_dtype(dtype):
            average = Average(total_N.clone(), 2.0, lambda: iter(deltas))
            state = FragmentState(vectors.__getitem__, {"weight": Span((3, 4), 0)})
            rule.on_average(state, average, Sync(0, 1, 1), cohort)
        made.append(vectors["outer"])
    assert made[0].equal(made[1]) and made[0].equal(made[2])


@pytest.mark.parametrize(
    ("name", "snapshot_rounds"),
    [
        ("restarted", 99),
        ("rda", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("ties", 99), ("delayed_nesterov", 99), ("torch", 2), ("sgd", 2), ("decayed", 99))
        ),
    ],
)
def test_in_a_store_the_replay_gives_the_outer_parameters_of_all_replicas(name, snapshot_rounds, tmp_path):
    """A replica joins from a snapshot of Θ and all slots, or without one takes all rounds, as the replay does."""
    outer = RULE_SPECS[name].replace(PLAIN, "blocks.1")
    rules = {"outer": outer, "snapshot_rounds": snapshot_rounds, "wire": "e3m0"}
    replicas = [Replica(str(tmp_path), name=each, **rules) for each in "ab"]
    until(lambda: min(replicas[0].rounds) >= 3, *replicas)
    replicas.append(Replica(str(tmp_path), name="c", **rules))
    until(lambda: min(min(replica.rounds) for replica in replicas) >= 5, *replicas)
    for replica in replicas:
        replica.vanish()
    replay = replayed(str(tmp_path), initial=lambda facts: dict(new_model().named_parameters()))
    if snapshot_rounds == 2:  # and what a snapshot makes needless is retired at any time
        assert replay.checked.snapshots
    else:
        assert replay.checked.steps == replay.checked.rounds > 12
    for replica in replicas:
        for p, outer_p in enumerate(replica.outer()):
            digest = f"{outer_digest(torch.from_numpy(outer_p)):016x}"
            assert replay.checksum(p, replica.rounds[p]) == digest


def test_in_a_store_the_momentum_restarts_where_by_half_others_are_active(tmp_path, monkeypatch):
    """One replica, two, three, four: of each fragment the first round with two restarts it, and that with four."""
    monkeypatch.setattr("diloco.rendezvous.log.index.retirable", lambda state, names: [])  # the replay reads all
    rules = {"outer": "nesterov:restart_with_members=true", "snapshot_rounds": 2}
    replicas = []
    for name in "abcd":
        replicas.append(Replica(str(tmp_path), name=name, **rules))
        rounds = max(replicas[0].rounds) + 2
        until(lambda rounds=rounds: min(min(replica.rounds) for replica in replicas) >= rounds, *replicas)
    for replica in replicas:
        replica.vanish()
    _, second, _, fourth = (k for k, entry in enumerate(chain(tmp_path)) if entry["kind"] == "join")
    first_rounds = {(p, min(rounds)) for after in (second, fourth) for p, rounds in rounds_after(tmp_path, after)}
    run = numpy_replay(tmp_path, theta0(), restarts=lambda p, number: (p, number) in first_rounds)
    for replica in replicas:
        for p, outer_p in enumerate(replica.outer()):
            np.testing.assert_array_equal(outer_p, run.outer[p][replica.rounds[p]])
    replay = replayed(str(tmp_path), initial=lambda facts: dict(new_model().named_parameters()))
    assert replay.checked.steps == replay.checked.rounds > 20 and len(first_rounds) == 2 * len(theta0())


def rounds_after(folder: Path, number: int) -> list[tuple[int, list[int]]]:
    """By fragment the rounds after an entry of the log."""
    bodies = [entry["body"] for entry in chain(folder)[number:] if entry["kind"] == "outer"]
    return [(p, [body["round"] for body in bodies if body["fragment"] == p]) for p in range(len(theta0()))]


def test_every_rule_is_tested_here_and_comes_back_from_its_facts():
    assert RULES.keys() <= RULE_SPECS.keys()
    assert MERGE_RULES.keys() - {"mix"} <= {spec.partition(":")[0] for spec in MERGES.values()}
    for spec in RULE_SPECS.values():
        rule = outer_rule(spec)
        again = rule_of_facts(type(rule).__name__, rule.facts())
        assert again is not None and again.facts() == rule.facts() and type(again) is type(rule)
    assert rule_of_facts("Signum", {}) is None
    assert rule_of_facts("TorchOptimizer", {"class": "somebody.Else"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"outer": "eager"},
            r"outer=Eager merges at the send, and mixing=Mixing\(alpha=0.5\) .* mixing=translate",
        ),
        ({"outer": "rda", "combine": "reduce_scatter"}, "outer=RDA reads the outer gradient of each replica"),
        ({"outer": "delayed_nesterov:delay=0"}, "delay=0 must be at least 1"),
        ({"outer": "delayed_nesterov:activation=0.6"}, "activation=0.6 must be from 0 to 1 / delay=2"),
        ({"outer": "nesterov:restart_every=-1"}, "restart_every=-1 must be at least 0"),
        ({"outer": "nesterov:final=0"}, "final=0.0 must be above 0"),
        ({"mixing": "taylor:strength=-1"}, "strength must be at least 0 and finite, not -1.0"),
    ],
)
def test_settings_with_which_a_rule_means_nothing_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Case().engine(Case().model(), **changes)
