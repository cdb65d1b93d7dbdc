"""The states that an engine takes up: its own, and with nothing in flight those of other settings, too."""

import copy
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, outer_of, train
from tests.engine.test_sharded import decoder, engine_of, processes
from tests.processes import run_replicas
from torch import nn

import diloco

RUNS = {
    "one in flight": (Case(P=2, H=4, tau=1), 7, 0),
    "merged by one replica": (Case(P=2, H=4, tau=(0, 3)), 6, None),
    "merged by both": (Case(P=2, H=4, tau=(0, 3)), 7, 0),
}
"""Cases of two runs: the steps taken, and the fragment that is refused."""


def load_in_every_wrong_way() -> dict[str, object]:
    """The refusals that one replica of two hears."""
    return {
        "other steps": load_different_steps(),
        "after other steps": load_after_different_steps(),
        "in flight": load_another_replicas_state(None, 12),
        "error": load_another_replicas_state(1.0, 17),
        "shared": load_another_replicas_state(None, 17),
        "drained": load_what_one_has_drained(),
        **{name: load_states_of_two_runs(case, num_steps) for name, (case, num_steps, _) in RUNS.items()},
    }


@pytest.fixture(scope="module")
def refusals() -> list[dict]:
    return run_replicas(load_in_every_wrong_way, 2)


def load_different_steps() -> str:
    case = Case()
    model = case.model()
    engine = case.engine(model)
    state = engine.state_dict() | {"num_steps": 7 + dist.get_rank()}
    with pytest.raises(diloco.DisagreementError) as caught:
        engine.load_state_dict(state)
    return str(caught.value)


def load_after_different_steps() -> str:
    model = Case().model()
    engine = Case().engine(model)
    state = copy.deepcopy(engine.state_dict())
    for _ in range(1 + dist.get_rank()):
        engine.step()
    with pytest.raises(diloco.DisagreementError) as caught:
        engine.load_state_dict(state)
    return str(caught.value)


def test_a_load_after_different_steps_is_refused(refusals):
    for heard in refusals:
        assert re.search(
            r"at load_state_dict\(\): replica 0 has 1, replica 1 has 2; go back after the same step on",
            heard["after other steps"],
        )


def test_states_of_different_steps_are_refused(refusals):
    for heard in refusals:
        steps = (
            "step of the loaded state: replica 0 has 7, replica 1 has 8; load states of one step on all replicas"
        )
        assert steps in heard["other steps"]


def test_a_state_in_flight_of_other_settings_is_refused_with_both_values():
    case = Case(beta=0.5, wire="int4", P=4)
    model = case.model()
    engine = case.engine(model)
    saved = [copy.deepcopy(engine.state_dict()) for _ in zip(range(5), train(engine, model, 9), strict=False)][-1]
    assert saved["in_flight"]
    for changes, message in (
        ({"error_feedback": None}, "error_feedback=0.5, and this engine has None"),
        ({"wire": "int2"}, "wire=int4:block=256,stochastic=false, and this engine has int2"),
        ({"combine": "reduce_scatter"}, "combine=gather, and this engine has reduce_scatter"),
        ({"seed": 3}, "seed=0, and this engine has 3"),
    ):
        other = case.engine(case.model(), **changes)
        with pytest.raises(ValueError, match=rf"the state was saved with {message}.* or call finish\(\) before"):
            other.load_state_dict(saved)
    model = case.model()
    backwards = tuple(reversed(diloco.sequential(model, layers_per_fragment=1)))
    with pytest.raises(ValueError, match=r"in flight and other fragments: .* call finish\(\) before"):
        case.engine(model, fragments=backwards).load_state_dict(saved)


BEFORE = Case(P=4, H=4, tau=2, wire="int4", beta=1.0)
"""A case whose run is finished after step 12, and goes on with other settings."""
COURSES: dict[str, Callable[[nn.Module], dict]] = {
    "H and τ": lambda _: {"schedule": replace(BEFORE, H=7, tau=5).schedule()},
    "offsets": lambda _: {"schedule": replace(BEFORE, offsets=(3, 1, 0, 2)).schedule()},
    "wire": lambda _: {"wire": "e3m0", "seed": 4},
    "combine": lambda _: {"combine": "reduce_scatter:bf16"},
    "one fragment": lambda model: {
        "fragments": diloco.whole(model),
        "schedule": diloco.Schedule(sync_every=5, num_fragments=1),
    },
    "other fragments": lambda model: {
        "fragments": tuple(reversed(diloco.sequential(model, layers_per_fragment=1)))
    },
    "no error feedback": lambda _: {"error_feedback": None},
    "less error feedback": lambda _: {"error_feedback": 0.5},
    "outer settings": lambda _: {"outer": diloco.Nesterov(lr=0.7, momentum=0.5)},
}


def finished() -> tuple[dict, dict]:
    """State and parameters after a run of `BEFORE`, drained."""
    model = BEFORE.model()
    engine = BEFORE.engine(model)
    for _ in train(engine, model, 12):
        pass
    return copy.deepcopy(engine.state_dict()), copy.deepcopy(model.state_dict())


def named(engine: diloco.StreamingDiLoCo, kind: str) -> dict:
    return engine.state_dict()[kind]


def change_course() -> tuple[dict, dict]:
    """State and parameters of each replica, and the outer hash of each course."""
    state, parameters = finished()
    hashes = {}
    for name, changes in COURSES.items():
        model = BEFORE.model()
        engine = BEFORE.engine(model, **changes(model))
        model.load_state_dict(parameters)
        engine.load_state_dict(state)
        for kind in ("outer", "velocity"):
            assert all(torch.equal(state[kind][n], tensor) for n, tensor in named(engine, kind).items()), name
        error = named(engine, "error")
        keeps = engine.settings.error_feedback == 1.0
        assert all(torch.equal(tensor, state["error"][n] * keeps) for n, tensor in error.items()), name
        for _ in train(engine, model, 25):
            pass
        assert engine.num_steps == 25
        hashes[name] = engine.outer_hash()
    return state, hashes


def go_on_from(states: list[dict]) -> str:
    """Replicas of another number, each from one of the states."""
    model = BEFORE.model()
    engine = BEFORE.engine(model)
    state = states[engine.exchange.replica % len(states)]
    engine.load_state_dict(state)
    is_own = engine.exchange.replica < len(states)
    errors = named(engine, "error").items()
    assert all(torch.equal(tensor, state["error"][name] * is_own) for name, tensor in errors)
    for _ in train(engine, model, 25):
        pass
    return engine.outer_hash()


@pytest.mark.slow
def test_a_finished_run_goes_on_with_other_settings():
    (first, hashes), (second, others) = run_replicas(change_course, 2)
    assert hashes == others and len(set(hashes.values())) == len(COURSES)
    assert first["last_sent"] == [12, 9, 10, 11]
    for M in (1, 3):
        assert len(set(run_replicas(go_on_from, M, [first, second]))) == 1


def test_parameters_may_be_frozen_and_unfrozen_after_a_finish():
    def built(*frozen: str) -> tuple[diloco.StreamingDiLoCo, nn.Module]:
        model = case.model()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return case.engine(model), model

    case = Case(P=2, H=4, tau=1)
    engine, model = built("blocks.1.bias")
    for _ in train(engine, model, 11):
        pass
    saved = copy.deepcopy(engine.state_dict())
    resumed, its_model = built("blocks.0.bias")
    its_model.load_state_dict(model.state_dict())
    nn.init.constant_(its_model.blocks[1].bias, 5)
    resumed.load_state_dict(saved)
    assert set(named(resumed, "outer")) == {"blocks.0.weight", "blocks.1.weight", "blocks.1.bias"}
    for kind, unfrozen in (("outer", 5.0), ("velocity", 0.0)):
        tensors = named(resumed, kind)
        assert tensors["blocks.1.bias"].tolist() == [unfrozen]
        for name in ("blocks.0.weight", "blocks.1.weight"):
            assert torch.equal(tensors[name], saved[kind][name])
    its_model.load_state_dict(model.state_dict())
    with pytest.raises(diloco.UserError, match="loaded into the model after the engine"):
        resumed.step()  # Θ of what was unfrozen is what the model had before


def test_a_state_with_something_in_flight_wants_its_schedule():
    short, long = Case(H=10, P=1, tau=1), Case(H=10, P=1, tau=5)

    def state_at(case: Case, step: int) -> dict:
        model = case.model()
        engine = case.engine(model)
        states = [engine.state_dict() for _, _ in zip(range(step), train(engine, model, 40), strict=False)]
        return states[-1]

    with pytest.raises(ValueError, match=r"saved with schedule=.*overlap_steps=\[5\].* has .*overlap_steps=\[1\]"):
        short.engine(short.model()).load_state_dict(state_at(long, 14))
    landed = state_at(short, 14)
    assert not landed["in_flight"]
    for other in (long, Case(H=7, P=1, tau=3)):
        model = other.model()
        engine = other.engine(model)
        engine.load_state_dict(landed)
        for _ in train(engine, model, 40):
            pass
        assert engine.num_steps == 40


def load_another_replicas_state(beta: float | None, num_steps: int) -> list[str]:
    """The refusals of replicas that load replica 0's state, as users of DDP do; empty where there is none."""
    case = Case(H=10, P=1, tau=5, beta=beta)
    model = case.model()
    engine = case.engine(model)
    states: list = [None, None]
    own = [engine.state_dict() for _ in zip(range(num_steps), train(engine, model, 20))][-1]  # noqa: B905
    dist.all_gather_object(states, own)
    again, start = case.engine(case.model()), time.monotonic()
    try:
        again.load_state_dict(states[0])
    except ValueError as error:
        assert time.monotonic() - start < 10, "no replica waits for one that has refused"
        return [type(error).__name__, str(error)]
    finally:
        engine.finish()
    again.finish()
    return []


@pytest.mark.parametrize("why", ["in flight", "error"])
def test_a_replica_does_not_take_up_the_state_of_another(why, refusals):
    """In flight at step 12; at step 17 nothing is, but the error is the replica's own."""
    first, second = (heard[why] for heard in refusals)
    assert first[0] == "DisagreementError" and "why the state can't be loaded: replica 0 has null" in first[1]
    assert second[0] == "UserError" and "saved with replica=0, and this engine has 1" in second[1]


def test_a_state_of_nothing_but_what_is_shared_is_any_replicas(refusals):
    assert [heard["shared"] for heard in refusals] == [[], []]


def load_what_one_has_drained() -> str:
    case = Case(H=10, P=1, tau=5)
    model = case.model()
    engine = case.engine(model)
    snapshots = train(engine, model, 12)
    states = [engine.state_dict() for _ in snapshots]
    with pytest.raises(diloco.DisagreementError) as caught:
        case.engine(case.model()).load_state_dict(states[-1 - dist.get_rank()])
    return str(caught.value)


def test_what_one_replica_has_drained_and_another_has_not_is_refused(refusals):
    for heard in refusals:
        assert "in flight in the loaded state" in heard["drained"]
        assert "replica 0 has [], replica 1 has [[0, 1, 10]]" in heard["drained"]


def load_states_of_two_runs(case: Case, num_steps: int) -> str:
    """The message of the refusal where each replica loads its state of another run; empty if there is none."""
    states = []
    for learning in (1, 2):
        model = case.model()
        engine = case.engine(model)
        for t in range(1, num_steps + 1):
            inner_step(model, 10 * learning + dist.get_rank(), t)
            engine.step()
        states.append(copy.deepcopy(engine.state_dict()))
        engine.finish()
    engine = case.engine(case.model())
    before, message = outer_of(engine), ""
    try:
        engine.load_state_dict(states[dist.get_rank()])
    except diloco.DisagreementError as error:
        assert outer_of(engine).tobytes() == before.tobytes() and engine.num_steps == 0
        engine.load_state_dict(states[0])
        message = str(error)
    engine.finish()
    return message


@pytest.mark.parametrize("name", RUNS)
def test_states_of_different_runs_are_refused_where_the_same_rounds_were_merged(name, refusals):
    """With an overlap of its own, replica 1 has merged nothing at step 6, and replica 0 both fragments."""
    fragment = RUNS[name][2]
    for heard in refusals:
        if fragment is None:
            assert not heard[name]
        else:
            assert heard[name].startswith(
                "replica 0 and replica 1 load states of different runs: their outer parameters"
            )
            assert f"velocity of fragment {fragment} differ" in heard[name]


def load_shards_of_two_runs() -> str:
    mesh = processes(2)
    model = decoder(mesh)
    engine = engine_of(model, mesh, wire="fp32")
    state = engine.state_dict()
    if dist.get_rank() == 3:
        state["velocity"] = {name: tensor + 1 for name, tensor in state["velocity"].items()}
    with pytest.raises(diloco.DilocoError) as caught:
        engine.load_state_dict(state)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.slow
def test_a_shard_of_another_run_is_refused_by_all_shards():
    messages = run_replicas(load_shards_of_two_runs, 4)
    assert [message.split(":")[0] for message in messages] == ["ExchangeError", "DisagreementError"] * 2
    assert "replica 0 and replica 1 load states of different runs" in messages[1]
