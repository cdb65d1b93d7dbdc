import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.publishing import cells
from diloco.publishing.differences import apply_to, content_digest, difference_of

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
]
DTYPES += [torch.uint8, torch.bool, torch.complex64, torch.uint16]
SHAPES = [(), (0,), (1,), (7, 3), (2, 0, 3), (300,), (1000,), (33, 100)]
DENSITIES = [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0]


def bits_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(rng, dtype, shape):
    """Any bits at all."""
    tensor = torch.empty(shape, dtype=dtype)
    raw = tensor.reshape(-1).view(torch.uint8)
    raw.numpy()[:] = rng.integers(0, 2 if dtype == torch.bool else 256, raw.numel(), np.uint8)
    return tensor


def changed(rng, tensor, density, most):
    """Another tensor: some cells are any bits, or steps of at most so many places."""
    size, other = tensor.itemsize // (2 if tensor.is_complex() else 1), tensor.clone()
    raw = other.reshape(-1).view(torch.uint8).numpy().view(f"<u{size}")
    where = rng.random(len(raw)) < density
    if tensor.dtype == torch.bool:
        raw[where] ^= 1
    elif most:
        raw[where] += rng.integers(-most, most, int(where.sum()), endpoint=True).astype(raw.dtype)
    else:
        raw[where] = rng.integers(0, 256, (int(where.sum()), size), np.uint8).view(raw.dtype).reshape(-1)
    return other


@st.composite
def pairs(draw):
    """Two states of one layout."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, new = {}, {}
    for name in draw(st.sets(st.sampled_from(["a", "b.weight", "c", "ü"]))):
        old[name] = tensor_of(rng, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES)))
        most = draw(st.sampled_from([0, 1, 3, 60]))
        new[name] = changed(rng, old[name], draw(st.sampled_from(DENSITIES)), most)
    return old, new


@settings(max_examples=200)
@given(states=pairs(), chunk=st.sampled_from([64, 256, cells.CHUNK]))
def test_the_new_state_is_the_old_one_with_the_difference_bit_by_bit(states, chunk):
    old, new = states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "CHUNK", chunk)
        body = difference_of(old, new)
        num_changed = apply_to(old, body, source="version 1")
    assert {name: bits_of(tensor) for name, tensor in old.items()} == {n: bits_of(t) for n, t in new.items()}
    assert content_digest(old) == content_digest(new)
    if any(tensor.is_complex() for tensor in old.values()):
        return
    assert num_changed <= sum(tensor.numel() for tensor in old.values())
