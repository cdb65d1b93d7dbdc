import gc
import weakref

import pytest
import torch
from tests.engine.cases import Case, inner_step

from diloco.engine.outer_state import OuterState


def state(*, offload: bool) -> OuterState:
    vectors = [torch.arange(3.0) + 10 * fragment for fragment in range(4)]
    outer = OuterState(vectors, slots=("velocity",), with_error=False, offload=offload)
    for velocity_N, vector_N in zip(outer.at_home("velocity"), vectors, strict=True):
        velocity_N.copy_(-vector_N)
    return outer


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_kept_is_what_is_used_next(offload):
    outer = state(offload=offload)
    outer.use("outer", 2).add_(1)
    outer.keep("outer", 2)
    outer.use("velocity", 1)
    assert torch.equal(outer.use("outer", 2), torch.tensor([21.0, 22, 23]))
    assert torch.equal(outer.at_home("outer")[2], torch.tensor([21.0, 22, 23]))
    assert torch.equal(outer.at_home("velocity")[2], torch.tensor([-20.0, -21, -22]))


def test_what_is_loaded_is_used_whatever_was_fetched_before():
    outer = state(offload=True)
    outer.expect(("outer",), 3)
    outer.at_home("outer")[3].zero_()
    assert torch.equal(outer.use("outer", 3), torch.zeros(3))


def test_one_fragment_is_on_the_device_at_a_time():
    outer = state(offload=True)
    outer.use("outer", 0), outer.use("velocity", 0)
    assert set(outer._visiting) == {("outer", 0), ("velocity", 0)}
    outer.expect(("outer", "velocity", "error"), 1)
    assert set(outer._visiting) == {("outer", 1), ("velocity", 1)}
    fetched = outer._visiting["outer", 1][0]
    assert outer.use("outer", 1) is fetched


def test_outer_steps_that_are_kept_keep_no_outer_parameters():
    case = Case(P=3, H=3, tau=0, offload=True)
    model = case.model()
    engine = case.engine(model)
    visitors = []
    use = engine._replica.state.use

    def used(kind, fragment):
        vector_N = use(kind, fragment)
        visitors.append(weakref.ref(vector_N))
        return vector_N

    engine._replica.state.use = used
    kept = []
    for t in range(1, 10):
        inner_step(model, 0, t)
        kept += engine.step()
    gc.collect()
    assert len(kept) > 4 and sum(visitor() is not None for visitor in visitors) <= 2
    assert all(outer_step.average.isfinite().all() for outer_step in kept)


@pytest.mark.parametrize("beta", [None, 1.0])
def test_the_engine_finds_the_next_fragment_fetched_before_it_is_due(beta):
    case = Case(P=3, H=6, tau=1, offload=True, beta=beta)
    model = case.model()
    engine = case.engine(model)
    fetched_at = []
    fetch = engine._replica.state._fetch
    engine._replica.state._fetch = lambda kind, fragment: (
        fetched_at.append((kind, fragment, engine.num_steps)),
        fetch(kind, fragment),
    )
    for t in range(1, 19):
        inner_step(model, 0, t)
        engine.step()
        assert len({fragment for _, fragment in engine._replica.state._visiting}) <= 1
    # Sent at 6, 8, 10, 12, …, and merged at 7, 9, …: after each event the next one's vectors are fetched.
    event_after = {6: ("velocity", 0), 7: ("outer", 1), 8: ("velocity", 1), 9: ("outer", 2), 11: ("outer", 0)}
    for step, (kind, fragment) in event_after.items():
        assert (kind, fragment, step) in fetched_at
    assert [step for *_, step in fetched_at if step < 6] == []
