import pytest

from diloco.errors import UserError
from diloco.simulator.model_size import ModelSize


@pytest.mark.parametrize("tied", [True, False])
def test_the_width_follows_from_the_number_of_parameters(tied):
    size = ModelSize(num_params=7e9, num_layers=32, tied_embeddings=tied)
    matrices = 1 if tied else 2
    width = size.outside_params / 32_000 / matrices
    assert 12 * 32 * width**2 + matrices * 32_000 * width == pytest.approx(7e9)
    assert 32 * size.block_params + size.outside_params == pytest.approx(7e9)


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"num_params": float("inf")}, "num_params must be above 0 and finite, not inf", "num_params"),
        ({"width": 0}, "width must be above 0 and finite, not 0", "width"),
        ({"width": 10_000}, "num_params=1e[+]08 leaves nothing for blocks beside vocab_size=32000", "num_params"),
    ],
)
def test_impossible_sizes_are_refused(changes, message, field):
    with pytest.raises(UserError, match=message) as refusal:
        ModelSize(**{"num_params": 1e8, "num_layers": 6, **changes})
    assert refusal.value.field == field
