import numpy as np

from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s


def test_the_needed_bandwidth_is_the_first_of_the_grid_that_reaches_the_target():
    utilization = np.linspace(0, 0.98, 50)
    assert needed_gbit_s(utilization, 0.5) == GBIT_S[25]
    assert needed_gbit_s(utilization, 0.98) == GBIT_S[49] == 1000
    assert needed_gbit_s(utilization, 0.99) is None
