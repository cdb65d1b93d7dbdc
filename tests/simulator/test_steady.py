from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diloco.simulator.steady import growth_rate

SECONDS = st.floats(0, 10)


@given(st.lists(st.lists(SECONDS, min_size=9, max_size=9), min_size=1, max_size=3), st.lists(SECONDS, min_size=3))
def test_the_rate_of_a_max_plus_matrix_is_its_largest_cycle_mean(matrices, start):
    a_BxSxS = np.array(matrices).reshape(-1, 3, 3)

    def period(x_SxB):
        return (a_BxSxS + x_SxB.T[:, None, :]).max(2).T

    cycles = [cycle for length in (1, 2, 3) for cycle in permutations(range(3), length)]
    means = [
        [np.mean([a_SxS[i, j] for i, j in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]) for cycle in cycles]
        for a_SxS in a_BxSxS
    ]
    start_SxB = np.repeat(np.array(start[:3])[:, None], len(matrices), axis=1)
    rate_B = growth_rate(period, start_SxB, longest_cycle=6)
    np.testing.assert_allclose(rate_B, np.max(means, axis=1), rtol=1e-9, atol=1e-9)
