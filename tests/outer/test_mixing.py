import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.outer.test_nesterov import SEEDS, f32, same_bits, vectors

from diloco.errors import UserError
from diloco.outer.merge import Mixing, Past


@given(SEEDS, st.floats(0.0, 1.0))
def test_the_merge_is_the_equation_in_float32(seed, alpha):
    theta, Theta = vectors(seed, 2)
    expected = f32(alpha) * theta + f32(1 - alpha) * Theta
    assert same_bits(Mixing(alpha).merge(torch.tensor(theta), torch.tensor(Theta), Past()), expected)


@pytest.mark.parametrize("alpha", [1.5, -0.1, float("nan")])
def test_a_part_that_is_none_is_refused(alpha):
    with pytest.raises(UserError, match=f"mixing must lie between 0 and 1, not {alpha}"):
        Mixing(alpha)
