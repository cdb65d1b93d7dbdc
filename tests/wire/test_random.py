import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.cases import KEYS

from diloco.wire import Key
from diloco.wire.payload import philox, random_bits

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
    bits = random_bits(key, length, CPU, common=False)
    assert bits.shape == (length,) and ((bits >= 0) & (bits < 2**32)).all()
    assert torch.equal(random_bits(key, length + more, CPU, common=False)[:length], bits)


@pytest.mark.parametrize("field", Key._fields)
def test_every_part_of_a_key_matters_but_the_replica_to_what_is_common(field):
    key = Key(2**40, 3, 5, 1, 2)
    other = key._replace(**{field: getattr(key, field) + 1})
    for common in (False, True):
        same = torch.equal(*(random_bits(k, 64, CPU, common=common) for k in (key, other)))
        assert same == (common and field == "replica")
