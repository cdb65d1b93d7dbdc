import numpy as np
import pytest

from diloco.errors import UserError
from diloco.simulator.replicas import Replica, Stragglers, replicas_of


def test_there_are_as_many_replicas_as_numbers():
    assert len(replicas_of(None, (0.1,), (0.0,), (None,))) == 2
    assert len(replicas_of(None, (0.1,), (0.0,), (None,), overlap_steps=(1, 2, 3))) == 3
    first, second = replicas_of(2, (0.1,), (0.0, 0.5), (1.0,))
    assert first == Replica(step_seconds=0.1, gbit_s=1.0)
    assert second == Replica(step_seconds=0.1, gbit_s=1.0, latency_seconds=0.5)


def test_compute_times_are_drawn_around_their_average():
    drawn = Stragglers(step_variation=0.5).draw(np.full(200_000, 2.0), np.random.default_rng(0))
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(2, rel=0.01) and drawn.std() == pytest.approx(1, rel=0.02)
    stalls = Stragglers(stall_probability=0.1, stall_seconds=3)
    stalled = stalls.draw(np.full(200_000, 2.0), np.random.default_rng(0))
    assert set(stalled) == {2.0, 5.0} and stalled.mean() == pytest.approx(2.3, rel=0.01)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Replica(step_seconds=0), "step_seconds"),
        (lambda: Replica(step_seconds=1, gbit_s=0), "link_gbit_s"),
        (lambda: Replica(step_seconds=1, latency_seconds=-1), "latency_seconds"),
        (lambda: replicas_of(3, (1.0,), (0.0, 1.0), (None,)), "latency_seconds"),
        (lambda: replicas_of(0, (1.0,), (0.0,), (None,)), "num_replicas"),
        (lambda: Stragglers(step_variation=-1), "step_variation"),
        (lambda: Stragglers(stall_probability=0.5), "stall_probability"),
    ],
)
def test_impossible_replicas_are_refused(make, field):
    with pytest.raises(UserError, match=field) as refusal:
        make()
    assert refusal.value.field == field
