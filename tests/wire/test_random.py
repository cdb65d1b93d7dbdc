import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.cases import KEYS

from diloco.wire import Key
from diloco.wire.payload import Mask, philox, random_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    """The answers are those of Random123, its authors' library."""
    words = [torch.tensor([int(word, 16)]) for word in counter.split()]
    k0, k1 = (int(word, 16) for word in key.split())
    assert " ".join(f"{word.item():08x}" for word in philox(words, (k0, k1))) == expected


@given(KEYS, st.integers(0, 50), st.integers(0, 50))
def test_random_bits_depend_on_the_key_and_the_place_alone(key, length, more):
    bits = random_bits(key, length, CPU)
    assert bits.shape == (length,) and ((bits >= 0) & (bits < 2**32)).all()
    assert torch.equal(random_bits(key, length + more, CPU)[:length], bits)


@pytest.mark.parametrize("field", Key._fields)
def test_every_part_of_a_key_matters_but_the_replica_to_a_mask(field):
    key = Key(2**40, 3, 5, 1, 2)
    other = key._replace(**{field: getattr(key, field) + 1})
    assert not torch.equal(random_bits(key, 64, CPU), random_bits(other, 64, CPU))
    masks = [Mask.of(k, 0.5).flags(1000, CPU) for k in (key, other)]
    if field == "replica":
        assert torch.equal(*masks)
    else:  # they agree in half of the places: the standard deviation is 16
        assert abs((masks[0] == masks[1]).sum() - 500) < 5 * 16


@pytest.mark.parametrize("density", [1e-12, 0.001, 0.05, 0.5, 0.9, 1.0])
def test_a_mask_keeps_each_place_with_the_density_and_independently_of_its_neighbours(density):
    num = 1 << 20
    is_kept = Mask.of(Key(7, 1, 2), density).flags(num, CPU).double()

    def assert_mean(values, mean) -> None:
        assert abs(values.mean().item() - mean) <= 5 * (mean * (1 - mean) / len(values)) ** 0.5 + 1 / num

    assert_mean(is_kept, density)
    for stride in (1, 2, 3, 16, 256, 1 << 16):  # neighbours, elements of a row, of a block
        assert_mean(is_kept[stride:] * is_kept[:-stride], density**2)
        assert_mean(is_kept[::stride], density)
