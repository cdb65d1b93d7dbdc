import numpy as np
import pytest

from diloco.errors import UserError
from diloco.simulator.bandwidth import GBIT_S, checked_gbit_s, needed_gbit_s


def test_the_needed_bandwidth_is_the_first_of_the_grid_that_reaches_the_target():
    utilization = np.linspace(0, 0.98, 50)
    assert needed_gbit_s(utilization, 0.5) == GBIT_S[25]
    assert needed_gbit_s(utilization, 0.98) == GBIT_S[49] == 1000
    assert needed_gbit_s(utilization, 0.99) is None


@pytest.mark.parametrize("gbit_s", [0, -1.0, np.nan, np.inf, [], [1.0, 0.0], [[1.0]]])
def test_impossible_bandwidths_are_refused(gbit_s):
    with pytest.raises(UserError, match="link_gbit_s must be above 0 and finite") as refusal:
        checked_gbit_s(gbit_s)
    assert refusal.value.field == "link_gbit_s"
