"""Legend: see tests/engine/cases.py."""

from itertools import combinations

import numpy as np
import pytest
from tests.engine.cases import SIZES, Case, inner_step
from tests.processes import run_replicas


def record_outer_steps(case: Case) -> list[tuple]:
    """Each outer step: sync, Δ, ‖Δ‖, the replicas' Δ_m, the cosines of the fragment and of its blocks."""
    model = case.model()
    engine = case.engine(model)
    records, blocked_seconds = [], 0.0
    for t in range(1, case.T + 1):
        inner_step(model, engine.exchange.replica, t)
        for step in engine.step():
            blocks = engine.settings.fragments[step.sync.fragment].blocks
            cosines = {block: step.mean_cosine(block) for block in (None, *blocks)}
            deltas = [delta_N.numpy() for delta_N in step.deltas]
            records.append((step.sync, step.average.numpy(), step.norm(), deltas, cosines))
            blocked_seconds += step.blocked_seconds
    assert engine.blocked_seconds == pytest.approx(blocked_seconds)
    return records


def mean_cosine(vectors: list[np.ndarray]) -> float:
    pairs = list(combinations([vector.astype(np.float64) for vector in vectors], 2))
    return sum(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs) / len(pairs)


def test_an_outer_step_tells_its_norm_and_how_far_the_replicas_agree():
    case = Case(P=2, T=9, wire="bf16", layers_per_fragment=2)
    results = run_replicas(record_outer_steps, 3, case)
    assert [sync for sync, *_ in results[0]] == [(0, 1, 4), (1, 1, 6), (0, 2, 8)]
    for (sync, average, norm, deltas, cosines), *others in zip(*results, strict=True):
        for _, other_average, _, other_deltas, _ in others:
            assert np.array_equal(other_average, average) and np.array_equal(other_deltas, deltas)
        np.testing.assert_allclose(average, np.mean(deltas, axis=0), rtol=1e-5, atol=1e-6)
        assert norm == pytest.approx(np.linalg.norm(average), rel=1e-5)
        first = 2 * sync.fragment
        border = SIZES[first] + 1
        assert cosines == {
            None: pytest.approx(mean_cosine(deltas), abs=1e-5),
            f"blocks.{first}": pytest.approx(mean_cosine([delta[:border] for delta in deltas]), abs=1e-5),
            f"blocks.{first + 1}": pytest.approx(mean_cosine([delta[border:] for delta in deltas]), abs=1e-5),
        }
    assert record_outer_steps(case)[0][-1] == {None: None, "blocks.0": None, "blocks.1": None}
