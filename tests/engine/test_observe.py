"""Legend: see tests/engine/cases.py."""

from itertools import combinations

import numpy as np
import pytest
import torch
from tests.engine.cases import SIZES, Case, inner_step
from tests.processes import run_replicas
from torch import nn

import diloco


def record_outer_steps(case: Case) -> list[tuple]:
    """Each outer step: sync, Δ, ‖Δ‖, the replicas' Δ_m, the cosines of the fragment and its blocks, ρ and gain."""
    model = case.model()
    engine = case.engine(model)
    records, blocked_seconds = [], 0.0
    for t in range(1, case.T + 1):
        inner_step(model, engine.exchange.replica, t)
        for step in engine.step():
            blocks = engine.settings.fragments[step.sync.fragment].blocks
            cosines = {block: step.mean_cosine(block) for block in (None, *blocks)}
            deltas = [delta_N.numpy() for delta_N in step.deltas]
            rho_and_gain = step.successive_cosine(), step.gain()
            records.append((step.sync, step.average.numpy(), step.norm(), deltas, cosines, rho_and_gain))
            if rho_and_gain[0] is not None:
                with torch.autocast("cpu", torch.bfloat16):  # as where it is around the whole body of a loop
                    logs = engine.logs()
                assert (logs["successive_cosine"], logs["gain"]) == rho_and_gain
            blocked_seconds += step.blocked_seconds
    assert engine.blocked_seconds == pytest.approx(blocked_seconds)
    return records


def mean_cosine(vectors: list[np.ndarray]) -> float:
    pairs = list(combinations([vector.astype(np.float64) for vector in vectors], 2))
    return sum(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs) / len(pairs)


def test_an_outer_step_tells_its_norm_and_how_far_the_replicas_agree():
    case = Case(P=2, T=15, wire="bf16", layers_per_fragment=2)
    results = run_replicas(record_outer_steps, 3, case)
    assert [sync for sync, *_ in results[0]] == [
        (0, 1, 4),
        (1, 1, 6),
        (0, 2, 8),
        (1, 2, 10),
        (0, 3, 12),
        (1, 3, 14),
    ]
    before = {}
    for (sync, average, norm, deltas, cosines, rho_and_gain), *others in zip(*results, strict=True):
        for _, other_average, _, other_deltas, _, other_rho in others:
            assert np.array_equal(other_average, average) and np.array_equal(other_deltas, deltas)
            assert other_rho == rho_and_gain
        np.testing.assert_allclose(average, np.mean(deltas, axis=0), rtol=1e-5, atol=1e-6)
        assert norm == pytest.approx(np.linalg.norm(average), rel=1e-5)
        first = 2 * sync.fragment
        border = SIZES[first] + 1
        assert cosines == {
            None: pytest.approx(mean_cosine(deltas), abs=1e-5),
            f"blocks.{first}": pytest.approx(mean_cosine([delta[:border] for delta in deltas]), abs=1e-5),
            f"blocks.{first + 1}": pytest.approx(mean_cosine([delta[border:] for delta in deltas]), abs=1e-5),
        }
        if sync.round == 1:
            assert rho_and_gain == (None, None)
        else:
            rho = mean_cosine([average, before[sync.fragment]])
            gain = case.eta * (1 + case.mu / (1 - case.mu * rho))
            assert rho_and_gain == (pytest.approx(rho, abs=1e-5), pytest.approx(gain, rel=1e-4))
        before[sync.fragment] = average
    assert record_outer_steps(case)[0][-2] == {None: None, "blocks.0": None, "blocks.1": None}


def test_the_successive_cosine_of_a_large_fragment_is_that_of_elements_all_over_it():
    """Two tensors whose outer gradients go on, and turn back: neither alone has the cosine of both."""
    model = nn.ParameterDict({"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)})
    settings = {"sync_every": 1, "overlap_steps": 0, "mixing": 0.0, "wire": "fp32"}
    engine = diloco.StreamingDiLoCo(
        model, fragments=diloco.whole(model), exchange=diloco.LoopbackExchange(), **settings
    )
    draw, steps = np.random.default_rng(0), []
    drawn = draw.standard_normal((2, 1 << 18), dtype=np.float32)
    for signs in ((1, 1), (2, -1)):
        with torch.no_grad():
            for parameter, part, sign in zip(model.values(), drawn, signs, strict=True):
                parameter += sign * torch.from_numpy(part)
        steps += engine.step()
    assert steps[1].successive_cosine() == pytest.approx((2 - 1) / np.sqrt(2 * 5), abs=0.03)
    state = engine.state_dict()
    engine.load_state_dict(state)
    with torch.no_grad():
        model["a"] += 1
    assert engine.step()[0].successive_cosine() is None, "the one before was taken by another engine"
    engine.finish()
    engine.reset_outer()
    with torch.no_grad():
        model["a"] += 1
    assert engine.step()[0].successive_cosine() is None, "the one before led to another Θ"
    engine.finish()
