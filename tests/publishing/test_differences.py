import shutil
from contextlib import contextmanager
from ctypes import c_int

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import PayloadError
from diloco.publishing import cells
from diloco.publishing.differences import apply_to, content_digest, difference_of
from diloco.wire.kernels.native import native

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


LEVELS = {"avx512": 2, "avx2": 1, "portable": 0}
IMPLEMENTATIONS = [*LEVELS, "plain"] if HAS_COMPILER else ["plain"]


@contextmanager
def implementation(name, chunk=cells.CHUNK):
    """Code cells by compiled C with at most such instructions, or in NumPy, in such chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if (compiled := native()) is not None:
            patch.setattr(c_int.in_dll(compiled._library, "cells_level"), "value", LEVELS.get(name, 2))
        patch.setattr(cells, "CHUNK", chunk)
        if name == "plain":
            patch.setattr(cells, "native", lambda: None)
        yield


@settings(max_examples=60)
@given(states=pairs(), chunk=st.sampled_from([64, 250, cells.CHUNK]))
def test_the_new_state_is_the_old_one_with_the_difference_bit_by_bit(states, chunk):
    old, new = states
    bodies, digest = set(), content_digest(old)
    for name in IMPLEMENTATIONS:
        state = {name: tensor.clone() for name, tensor in old.items()}
        with implementation(name, chunk):
            bodies.add(body := bytes(difference_of(old, new)))
            num_changed = apply_to(state, body, source="version 1")
        assert {name: bits_of(tensor) for name, tensor in state.items()} == {n: bits_of(t) for n, t in new.items()}
        assert num_changed == sum(int((cells_of(old[n]) != cells_of(new[n])).sum()) for n in old)
    assert len(bodies) == 1, "the same bytes"
    assert content_digest(old) == digest and content_digest(state) == content_digest(new)
    assert (digest == content_digest(new)) == (num_changed == 0)


@pytest.mark.parametrize("density", [1e-5, 0.01, 0.3, 1.0])
def test_whole_chunks_have_the_same_bytes_in_both_forms(density):
    rng, bodies = np.random.default_rng(7), set()
    old = {str(d): tensor_of(rng, d, (cells.CHUNK + 1000,)) for d in (torch.bfloat16, torch.float32)}
    new = {name: changed(rng, tensor, density, 5) for name, tensor in old.items()}
    for name in IMPLEMENTATIONS:
        state = {name: tensor.clone() for name, tensor in old.items()}
        with implementation(name):
            bodies.add(body := bytes(difference_of(old, new)))
            apply_to(state, body, source="version 1")
        assert content_digest(state) == content_digest(new)
    assert len(bodies) == 1


def test_a_gap_of_more_than_16_bits_has_the_same_bytes_in_both_forms():
    old, bodies = np.zeros(cells.CHUNK, np.uint16), set()
    new = old.copy()
    new[[3, -1]] = 1
    for name in IMPLEMENTATIONS:
        body = np.empty(old.nbytes + cells.SLACK, np.uint8)
        with implementation(name):
            lengths = cells.encode([(old, new)], body)
            bodies.add(bytes(body[: sum(lengths)]))
            cells.decode(lengths, body.data[: sum(lengths)], [state := old.copy()])
        assert (state == new).all()
    assert len(bodies) == 1


@settings(max_examples=100)
@given(states=pairs(), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_damaged_difference_is_refused_or_means_one_thing_and_never_half_of_it(states, seed, data):
    old, new = states
    rng = np.random.default_rng(seed)
    with implementation(IMPLEMENTATIONS[0], 250):
        body = bytearray(difference_of(old, new))
    for _ in range(data.draw(st.integers(1, 4))):
        at = int(rng.integers(0 if rng.random() < 0.1 else 40, len(body) + 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "overwrite"])):
            case "flip" if at < len(body):
                body[at] ^= 1 << int(rng.integers(8))
            case "cut":
                del body[at : at + int(rng.integers(1, 9))]
            case "insert":
                body[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case "overwrite":
                body[at : at + 4] = rng.bytes(min(4, len(body) - at))
    results = []
    for name in IMPLEMENTATIONS:
        state = {name: tensor.clone() for name, tensor in old.items()}
        try:
            with implementation(name, 250):
                num_changed = apply_to(state, body, source="version 7")
            results.append((num_changed, content_digest(state)))
        except PayloadError as error:
            assert content_digest(state) == content_digest(old), "nothing was written"
            results.append(str(error))
    assert len(set(results)) == 1, "native and plain code agree"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
@pytest.mark.parametrize("gaps", [[199], [200], [0, 99, 98], [0, 99, 99], [30, 2**18 - 5]])
def test_a_difference_changes_the_last_cell_and_none_beyond(gaps, dtype, name):
    """Numbers y = d + 4, d unchanged cells before each changed one, in planes written here by hand."""
    values, planes = [gap + 4 for gap in gaps], []
    planes += [[y >> bit & 1 for y in values] for bit in (0, 1)]
    for bit in range(2, 17):
        if values:
            planes += [[y >> bit + 1 > 0 for y in values]]
            values = [y for y in values if y >> bit + 1]
            planes += [[y >> bit & 1 for y in values]]
    planes += [[0] * len(gaps), [0] * len(gaps)]  # signs, and no step is longer than one place
    head = bytes([0, 0, len(gaps), 0, 2, *[0] * 9])
    body = head + b"".join(np.packbits(np.array(bits, bool), bitorder="little").tobytes() for bits in planes)
    places = np.cumsum(np.array(gaps) + 1) - 1
    state = np.zeros(200, dtype)
    with implementation(name):
        if places[-1] >= len(state):
            with pytest.raises(PayloadError):
                cells.decode([len(body)], memoryview(body), [state])
            assert not state.any()
        else:
            assert cells.decode([len(body)], memoryview(body), [state]) == len(gaps)
            assert np.flatnonzero(state).tolist() == places.tolist()


def test_a_difference_on_another_base_means_one_thing_for_all():
    rng = np.random.default_rng(3)
    old = {"a": torch.from_numpy(rng.normal(0, 0.02, 3000).astype(np.float32)).bfloat16()}
    for density in (0.02, 0.2, 0.9):
        new, digests = {"a": changed(rng, old["a"], density, 3)}, set()
        for name in IMPLEMENTATIONS:
            state = {"a": 16 * old["a"][torch.arange(3000) // 2]}  # with other cells in the classes
            with implementation(name, 1000):
                num_changed = apply_to(state, difference_of(old, new), source="version 1")
            digests.add((num_changed, content_digest(state)))
        assert len(digests) == 1 and digests != {(0, content_digest(new))}


def test_every_flipped_bit_changes_the_content_digest():
    state = {"a": torch.arange(40.0).bfloat16(), "b": torch.zeros(3, dtype=torch.int64)}
    digests = {content_digest(state)}
    for tensor in state.values():
        raw = tensor.view(torch.uint8)
        for at in range(8 * len(raw)):
            raw[at // 8] ^= 1 << at % 8
            digests.add(content_digest(state))
            raw[at // 8] ^= 1 << at % 8
    assert len(digests) == 1 + 8 * (80 + 24)
    others = {"a": state["a"].view(5, 8)}, {"c": state["a"]}, {"a": state["a"].view(torch.int16)}
    assert len({content_digest(state | other) for other in others} | digests) == len(digests) + 3


REFUSALS = {
    "a file of another kind": (lambda b: b"PK" + b[2:], "is no difference of weights"),
    "nothing": (lambda b: b"", "is no difference of weights"),
    "another model": (lambda b: b[:20] + b"x" + b[21:], "of a model with other names, shapes or dtypes"),
    "an end in the head": (lambda b: b[:30], "of a model with other names, shapes or dtypes"),
    "an end in the lengths": (lambda b: b[:45], "has 45 bytes, and ends before its lengths do"),
    "a cut": (lambda b: b[:-1], r"has (\d+) bytes, and should have (\d+)"),
    "more": (lambda b: b + b"x", r"has (\d+) bytes, and should have (\d+)"),
    "a number of changes": (lambda b: b[:48] + b"\xff" * 4 + b[52:], "damaged at b.weight: a chunk of cells"),
    "a parameter": (lambda b: b[:60] + b"\xff" + b[61:], "damaged at b.weight: a chunk of cells"),
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", REFUSALS)
def test_an_unsound_difference_is_refused_with_a_sentence(case, name):
    damage, sentence = REFUSALS[case]
    old = {"a": torch.zeros(100), "b.weight": torch.zeros(200, dtype=torch.bfloat16)}
    new = {"a": torch.zeros(100), "b.weight": torch.zeros(200, dtype=torch.bfloat16)}
    new["b.weight"][::50] = 1
    with implementation(name):
        body = bytes(difference_of(old, new))
        with pytest.raises(PayloadError, match=f"version 7 .*{sentence}"):
            apply_to(old, damage(body), source="version 7")
    assert not old["b.weight"].any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_tensor_is_written_where_the_last_one_is_damaged(name):
    old = {str(n): torch.zeros(3000) for n in range(4)}
    new = {str(n): torch.full((3000,), float(n + 1)) for n in range(4)}
    with implementation(name, 1000):
        body = bytearray(difference_of(old, new))
        body[-100] ^= 0xFF
        body[40 + 4 * 11] -= 1
        with pytest.raises(PayloadError):
            apply_to(old, body, source="version 7")
    assert not any(tensor.any() for tensor in old.values())


def test_threads_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    old = {str(n): tensor_of(rng, torch.bfloat16, (20_000,)) for n in range(3)}
    new = {name: changed(rng, tensor, 0.1, 2) for name, tensor in old.items()}
    monkeypatch.setattr(cells, "CHUNK", 1000)
    bodies = set()
    for num_threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        state = {name: tensor.clone() for name, tensor in old.items()}
        bodies.add(body := bytes(difference_of(old, new)))
        apply_to(state, body, source="version 1")
        assert content_digest(state) == content_digest(new)
    assert len(bodies) == 1
