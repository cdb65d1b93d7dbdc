"""Legend: see tests/engine/cases.py."""

import io
import time

import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, theta_of, train
from tests.processes import run_replicas
from torch import nn

import diloco

RESUMED = [
    Case(P=1, tau=3, wire="e3m0"),
    Case(P=4, H=5, tau=4, wire="bf16", parameters="bf16"),
    Case(P=3, tau=0, first_sync="early"),
    Case(P=4, H=6, tau=(0, 5), wire="e3m0"),
    Case(P=3, H=5, tau=(4, 1), alpha=0.0),
    Case(P=3, H=5, tau=(1, 4), wire="e3m0", combine="reduce_scatter:bf16", beta=0.9, offload=True),
]


def resume_after_every_step(case: Case) -> None:
    model = case.model()
    engine = case.engine(model)
    checkpoints = {}

    def save(t: int) -> None:
        checkpoints[t] = io.BytesIO()
        torch.save({"engine": engine.state_dict(), "model": model.state_dict()}, checkpoints[t])

    save(0)
    history = list(train(engine, model, case.T, after_step=save))
    for t, checkpoint in checkpoints.items():
        checkpoint.seek(0)
        state = torch.load(checkpoint, weights_only=True)
        resumed_model = case.model()
        nn.init.zeros_(resumed_model.blocks[0].weight)
        resumed = case.engine(resumed_model)
        resumed_model.load_state_dict(state["model"])
        resumed.load_state_dict(state["engine"])
        for actual, expected in zip(train(resumed, resumed_model, case.T), history[t:], strict=True):
            assert actual.theta.tobytes() == expected.theta.tobytes(), (t, case)
            assert actual.Theta.tobytes() == expected.Theta.tobytes(), (t, case)
        for counter in ("num_steps", "bytes_sent", "bytes_received"):
            assert getattr(resumed, counter) == getattr(engine, counter), (counter, t, case)
        assert resumed.outer_hash() == engine.outer_hash()


def resume_all(cases: list[Case]) -> None:
    for case in cases:
        resume_after_every_step(case)


def test_a_run_resumes_bit_for_bit_with_exchanges_in_flight():
    run_replicas(resume_all, 2, RESUMED)


def load_different_steps() -> str:
    case = Case()
    model = case.model()
    engine = case.engine(model)
    state = engine.state_dict() | {"num_steps": 7 + dist.get_rank()}
    with pytest.raises(diloco.DisagreementError) as caught:
        engine.load_state_dict(state)
    return str(caught.value)


def test_states_of_different_steps_are_refused():
    for message in run_replicas(load_different_steps, 2):
        assert "step of the loaded state: replica 0 has 7, replica 1 has 8" in message


def test_a_state_of_other_settings_is_refused_with_both_values():
    case = Case(beta=0.5, wire="int4")
    with_error = case.engine(case.model(), error_feedback=0.5)
    for changes, message in (
        ({"error_feedback": None}, "error_feedback=0.5, and this engine has None"),
        ({"wire": "int2"}, "wire=int4:block=256,stochastic=false, and this engine has int2"),
        ({"combine": "reduce_scatter"}, "combine=gather, and this engine has reduce_scatter"),
        ({"seed": 3}, "seed=0, and this engine has 3"),
    ):
        other = case.engine(case.model(), **changes)
        with pytest.raises(ValueError, match=f"the state was saved with {message}"):
            other.load_state_dict(with_error.state_dict())


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


def load_the_others_state() -> str:
    case = Case(H=10, P=1, tau=(0, 5))
    model = case.model()
    engine = case.engine(model)
    states: list = [None, None]
    dist.all_gather_object(states, [engine.state_dict() for _ in zip(range(12), train(engine, model, 20))][-1])  # noqa: B905
    own, others = states[dist.get_rank()], states[1 - dist.get_rank()]
    again = case.engine(case.model())
    again.load_state_dict(own)
    with pytest.raises(ValueError, match="own_overlap_steps") as caught:
        case.engine(case.model()).load_state_dict(others)
    return str(caught.value)


def test_a_replica_does_not_take_up_the_state_of_one_with_another_overlap():
    message, _ = run_replicas(load_the_others_state, 2)
    assert "own_overlap_steps=5, and this engine has 0" in message


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
    return []


@pytest.mark.parametrize(("beta", "num_steps"), [(None, 12), (1.0, 17)])
def test_a_replica_does_not_take_up_the_state_of_another(beta, num_steps):
    """In flight at step 12; at step 17 nothing is, but the error is the replica's own."""
    first, second = run_replicas(load_another_replicas_state, 2, beta, num_steps)
    assert first[0] == "DisagreementError" and "why the state can't be loaded: replica 0 has null" in first[1]
    assert second[0] == "UserError" and "saved with replica=0, and this engine has 1" in second[1]


def test_a_state_of_nothing_but_what_is_shared_is_any_replicas():
    assert run_replicas(load_another_replicas_state, 2, None, 17) == [[], []]


def load_what_one_has_drained() -> str:
    case = Case(H=10, P=1, tau=5)
    model = case.model()
    engine = case.engine(model)
    snapshots = train(engine, model, 12)
    states = [engine.state_dict() for _ in snapshots]
    with pytest.raises(diloco.DisagreementError) as caught:
        case.engine(case.model()).load_state_dict(states[-1 - dist.get_rank()])
    return str(caught.value)


def test_what_one_replica_has_drained_and_another_has_not_is_refused():
    for message in run_replicas(load_what_one_has_drained, 2):
        assert (
            "in flight in the loaded state" in message
            and "replica 0 has [], replica 1 has [[0, 1, 10]]" in message
        )


def test_room_for_what_was_in_flight_is_fp32_whatever_the_default():
    engine = Case().engine(Case().model())
    torch.set_default_dtype(torch.bfloat16)
    try:
        room = engine.state_like({"in_flight": [(0, 1, 4)]})["sent"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in room.values()} == {torch.float32}


def drain_and_go_on(case: Case, drained: int) -> tuple[list, list]:
    """Steps with a drain in the middle, in one engine and through a state that was saved after the drain."""
    model = case.model()
    engine = case.engine(model)
    snapshots = list(train(engine, model, drained))
    state, theta = engine.state_dict(), theta_of(model)
    resumed_model = case.model()
    resumed = case.engine(resumed_model)
    resumed.load_state_dict(state)
    parts = torch.from_numpy(theta).split([p.numel() for p in resumed_model.parameters()])
    with torch.no_grad():
        for p, part_N in zip(resumed_model.parameters(), parts, strict=True):
            p.copy_(part_N.view_as(p))
    assert snapshots[-1].theta.tobytes() == theta_of(resumed_model).tobytes()
    return list(train(engine, model, case.T)), list(train(resumed, resumed_model, case.T))


@pytest.mark.parametrize("tau", [0, 3, (1, 3)])
def test_a_run_may_go_on_after_a_drain(tau):
    for one, other in run_replicas(drain_and_go_on, 2, Case(tau=tau), 9):
        assert len(one) == len(other) > 0
        for mine, theirs in zip(one, other, strict=True):
            assert (
                mine.theta.tobytes() == theirs.theta.tobytes() and mine.Theta.tobytes() == theirs.Theta.tobytes()
            )


def test_an_engine_that_failed_takes_up_no_state():
    case = Case(P=1, H=2, tau=0)
    model = case.model()
    engine = case.engine(model)
    saved = engine.state_dict()
    engine.step()
    nn.init.constant_(model.blocks[0].weight, float("nan"))
    with pytest.raises(diloco.NonFiniteError):
        engine.step()
    for go_on in (lambda: engine.load_state_dict(saved), engine.step):
        with pytest.raises(ValueError, match="step 2 failed: build a new engine"):
            go_on()
