"""Legend: see tests/engine/cases.py."""

import copy
import io
import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.engine.cases import Case, inner_step, theta_of, train
from tests.processes import run_replicas
from torch import nn

import diloco

RESUMED = [
    Case(P=1, tau=3, wire="e3m0"),
    Case(P=4, H=5, tau=4, wire="bf16", parameters="bf16"),
    Case(P=3, tau=0, first_sync="early"),
    Case(P=4, H=6, tau=(0, 5), wire="e3m0"),
    Case(P=3, H=5, tau=(4, 1), alpha=0.0, weights="tokens_squared_per_step"),
    Case(
        P=3, H=5, tau=(1, 4), wire="e3m0", combine="reduce_scatter:bf16", beta=0.9, offload=True, weights="tokens"
    ),
    Case(P=3, H=5, tau=(1, 4), wire="sparseloco:block=64,k=8", beta=0.95, eta=1.0, mu=0.0),
    Case(P=3, H=5, tau=3, wire="pulse:density=0.5", beta=1.0, offload=True, lr=3e-5),
]


def resume_after_every_step(case: Case) -> None:
    """For a period, from the step before the first fragment is sent."""
    model = case.model()
    engine = case.engine(model)
    checkpoints = {}
    first = 0 if case.first_sync == "early" else case.H - 1

    def save(t: int) -> None:
        if not first <= t <= first + case.H:
            return
        checkpoints[t] = io.BytesIO()
        torch.save({"engine": engine.state_dict(), "model": model.state_dict()}, checkpoints[t])

    save(0)
    history = list(train(engine, model, case.T, after_step=save, lr=case.lr))
    for t, checkpoint in checkpoints.items():
        checkpoint.seek(0)
        state = torch.load(checkpoint, weights_only=True)
        resumed_model = case.model()
        nn.init.zeros_(resumed_model.blocks[0].weight)
        resumed = case.engine(resumed_model)
        resumed_model.load_state_dict(state["model"])
        resumed.load_state_dict(state["engine"])
        for actual, expected in zip(train(resumed, resumed_model, case.T, lr=case.lr), history[t:], strict=True):
            assert actual.theta.tobytes() == expected.theta.tobytes(), (t, case)
            assert actual.Theta.tobytes() == expected.Theta.tobytes(), (t, case)
        for counter in ("num_steps", "bytes_sent", "bytes_received"):
            assert getattr(resumed, counter) == getattr(engine, counter), (counter, t, case)
        assert resumed.outer_hash() == engine.outer_hash()


def resume_all(cases: list[Case]) -> None:
    for case in cases:
        resume_after_every_step(replace(case, T=11))


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_with_exchanges_in_flight():
    run_replicas(resume_all, 2, RESUMED)


def test_the_tokens_that_were_read_resume():
    case = Case(H=2, tau=0)
    engine = case.engine(case.model())
    for t in range(3):
        engine.step(tokens=np.int64(100 + t))
    state = copy.deepcopy(engine.state_dict())
    assert type(state["tokens"]) is int
    resumed = case.engine(case.model())
    resumed.load_state_dict(state)
    resumed.step(tokens=7)
    assert resumed.tokens == engine.tokens + 7 == 310


def test_keys_and_shapes_are_the_same_whatever_is_in_flight():
    case = Case(P=3, H=6, tau=3)
    model = case.model()
    engine = case.engine(model)
    shapes, flying = [], set()

    def look(t: int) -> None:
        state = engine.state_dict()
        tensors = {
            (kind, name): value for kind in ("outer", "velocity", "sent") for name, value in state[kind].items()
        }
        shapes.append((list(state), [(key, value.shape, value.dtype) for key, value in tensors.items()]))
        flying.add(tuple(fragment for fragment, *_ in state["in_flight"]))

    look(0)
    for _ in train(engine, model, 16, after_step=look):
        pass
    assert all(each == shapes[0] for each in shapes)
    assert {(), (0,), (0, 1), (1, 2)} <= flying


def resume_by_torchs_checkpoints(folder: Path) -> list[bool]:
    """A run of Stateful objects, saved after a step with something in flight, and after one with nothing."""
    case = Case(P=4, H=6, tau=(0, 5), wire="e3m0", beta=1.0)

    def built() -> tuple[diloco.StreamingDiLoCo, nn.Module, dict]:
        model = case.model()
        engine = case.engine(model)
        optimizer = torch.optim.AdamW(model.parameters())
        return engine, model, {"model": model, "optimizer": optimizer, "engine": engine}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group, as intended: a file a replica
        engine, model, parts = built()
        where = folder / str(dist.get_rank())

        def save(t: int) -> None:
            if t in (3, 13):
                dcp.save(parts, checkpoint_id=where / str(t), no_dist=True)

        history, same = list(train(engine, model, 20, after_step=save)), []
        for t in (3, 13):
            resumed, its_model, parts = built()
            nn.init.zeros_(its_model.blocks[0].weight)
            dcp.load(parts, checkpoint_id=where / str(t), no_dist=True)
            assert bool(resumed.state_dict()["in_flight"]) == (t == 13)
            again = list(train(resumed, its_model, 20))
            same += [a.theta.tobytes() == b.theta.tobytes() for a, b in zip(again, history[t:], strict=True)]
            same += [resumed.outer_hash() == engine.outer_hash()]
    return same


@pytest.mark.slow
def test_the_engine_is_saved_and_loaded_in_place_by_torchs_checkpoints(tmp_path):
    for same in run_replicas(resume_by_torchs_checkpoints, 2, tmp_path):
        assert all(same)


def drain_all(cases: list[Case], drained: int) -> list[tuple[list, list]]:
    return [drain_and_go_on(case, drained) for case in cases]


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


def test_a_run_may_go_on_after_a_drain():
    cases = [Case(tau=tau) for tau in (0, 3, (1, 3))]
    for one, other in itertools.chain(*run_replicas(drain_all, 2, cases, 9)):
        assert len(one) == len(other) > 0
        for mine, theirs in zip(one, other, strict=True):
            assert (
                mine.theta.tobytes() == theirs.theta.tobytes() and mine.Theta.tobytes() == theirs.Theta.tobytes()
            )


def test_a_payload_in_flight_that_memory_has_changed_is_not_saved():
    case = Case(P=1, H=2, tau=1, wire="e3m0")
    model = case.model()
    engine = case.engine(model)
    for t in (1, 2):
        inner_step(model, 0, t)
        engine.step()
    engine.state_dict()
    engine._membership.in_flight[0].payloads[0][-1] ^= 255
    with pytest.raises(diloco.PayloadError, match=r"step 2: fragment 0, round 1: .* does not match its checksum"):
        engine.state_dict()


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
