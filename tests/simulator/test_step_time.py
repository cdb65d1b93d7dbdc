import pytest

from diloco.errors import UserError
from diloco.simulator.step_time import step_seconds
from diloco.simulator.wall_clock import IdealizedRun

MACHINE = {"num_params": 1e9, "batch_tokens": 2**20, "num_chips": 512, "flops_per_chip": 300e12}


def test_a_step_is_its_part_of_the_whole_runs_compute():
    run = IdealizedRun(num_tokens=20e9, **MACHINE)
    assert step_seconds(**MACHINE) == pytest.approx(run.compute_seconds / run.num_steps)
    assert step_seconds(**MACHINE, mfu=0.4) == pytest.approx(step_seconds(**MACHINE) / 0.4)


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"num_chips": 0}, "num_chips must be above 0 and finite, not 0", "num_chips"),
        ({"batch_tokens": float("inf")}, "batch_tokens must be above 0 and finite, not inf", "batch_tokens"),
        ({"mfu": 60}, "mfu must be above 0 and at most 1, not 60", "mfu"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message, field):
    with pytest.raises(UserError, match=message) as refusal:
        step_seconds(**MACHINE | changes)
    assert refusal.value.field == field
