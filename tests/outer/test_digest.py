from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.outer import reference

from diloco.outer.digest import outer_digest, outer_digest_on_device
from diloco.wire.kernels import native

f32 = np.float32
LENGTHS = (0, 1, 255, 256, 257, 65279, 65280, 65281, 100_003)


def there(theta: np.ndarray) -> int:
    return int(outer_digest_on_device(torch.from_numpy(theta)).sum()) % (1 << 64)


def here(theta: np.ndarray) -> int:
    return outer_digest(torch.from_numpy(theta))


@pytest.mark.parametrize("length", LENGTHS)
def test_native_code_and_torch_give_the_digest_of_its_definition(length):
    random = np.random.default_rng(length)
    for start in (0, 1, 200):
        bits = random.integers(0, 1 << 32, start + length, dtype=np.uint32)
        theta = bits.view(f32)[start:]
        assert here(theta) == there(theta) == reference.digest(theta)
    with patch("diloco.outer.digest.native", return_value=None):
        assert here(theta) == reference.digest(theta)


def test_threads_and_layout_change_no_digest():
    theta = torch.randn(3 * 65280 * 8 + 11)
    expected, before = reference.digest(theta.numpy()), torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            with patch.object(native, "_ELEMENTS_PER_THREAD", 1000):
                assert outer_digest(theta) == expected
    finally:
        torch.set_num_threads(before)
    assert outer_digest(torch.stack([theta, -theta], dim=1)[:, 0].requires_grad_()) == expected


def test_one_flipped_bit_is_always_seen():
    random = np.random.default_rng(1)
    theta = random.standard_normal(140_001).astype(f32)
    before = here(theta)
    for k in range(300):
        bit, i = k % 32, len(theta) - 1 if k == 7 else random.integers(len(theta))
        theta.view(np.uint32)[i] ^= np.uint32(1 << bit)
        assert here(theta) != before
        theta.view(np.uint32)[i] ^= np.uint32(1 << bit)
    assert here(theta) == before


def test_signs_blocks_and_small_changes_in_many_places_are_seen():
    random = np.random.default_rng(2)
    theta = random.standard_normal(4 * 65280).astype(f32)
    nudged = (theta.view(np.int32) + random.choice([-1, 1], theta.shape).astype(np.int32)).view(f32)
    blocks = theta.reshape(4, 65280)
    changed = [
        theta,
        -theta,
        2 * theta,
        nudged,
        blocks[::-1].reshape(-1),
        np.roll(theta, 1),
        np.roll(theta, 256),
        np.roll(theta, 65536),
        theta[:-65280],
    ]
    places = theta.copy()
    places.view(np.int32)[:3] += np.array([1, -2, 1], np.int32)
    changed.append(places)
    digests = [here(np.ascontiguousarray(values)) for values in changed]
    assert len(set(digests)) == len(digests)
    assert here(theta) == digests[0]
