import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.publishing import cells
from diloco.publishing.differences import apply_to, content_digest, difference_of

HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
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


def cells_of(tensor):
    size = tensor.itemsize // (2 if tensor.is_complex() else 1)
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"<u{size}")


def tensor_of(rng, dtype, shape):
    """Any bits at all."""
    tensor = torch.empty(shape, dtype=dtype)
    raw = tensor.reshape(-1).view(torch.uint8)
    raw.numpy()[:] = rng.integers(0, 2 if dtype == torch.bool else 256, raw.numel(), np.uint8)
    return tensor


def changed(rng, tensor, density, most):
    """Another tensor: some cells are any bits, or steps of at most so many places."""
    raw = cells_of(other := tensor.clone())
    where = rng.random(len(raw)) < density
    if tensor.dtype == torch.bool:
        raw[where] ^= 1
    elif most:
        raw[where] += rng.integers(-most, most, int(where.sum()), endpoint=True).astype(raw.dtype)
    else:
        raw[where] = rng.integers(0, 256, (int(where.sum()), raw.itemsize), np.uint8).view(raw.dtype).reshape(-1)
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


IMPLEMENTATIONS = ["native", "plain"] if HAS_COMPILER else ["plain"]


@contextmanager
def implementation(name, chunk=cells.CHUNK):
    """Code cells as compiled C or in NumPy, in chunks of some length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "CHUNK", chunk)
        if name == "plain":
            patch.setattr(cells, "native", lambda: None)
        yield


@settings(max_examples=200)
@given(states=pairs(), chunk=st.sampled_from([64, 250, cells.CHUNK]))
def test_the_new_state_is_the_old_one_with_the_difference_bit_by_bit(states, chunk):
    old, new = states
    bodies, digest = set(), content_digest(old)
    for name in IMPLEMENTATIONS:
        state = {name: tensor.clone() for name, tensor in old.items()}
        with implementation(name, chunk):
            bodies.add(body := difference_of(old, new))
            num_changed = apply_to(state, body, source="version 1")
        assert {name: bits_of(tensor) for name, tensor in state.items()} == {n: bits_of(t) for n, t in new.items()}
        assert num_changed == sum(int((cells_of(old[n]) != cells_of(new[n])).sum()) for n in old)
    assert len(bodies) == 1, "the same bytes"
    assert content_digest(old) == digest and content_digest(state) == content_digest(new)
    assert (digest == content_digest(new)) == (num_changed == 0)
