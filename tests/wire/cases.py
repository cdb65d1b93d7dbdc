"""The codecs and vectors that the tests share, and the two implementations of the codecs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st
from tests.wire import reference

from diloco.wire import Key, codec
from diloco.wire.formats import HEADER_BYTES

f32 = np.float32
UNSCALED = ["fp32", "bf16", "fp16"]
SCALED_FLOATS = ["e4m3", "e5m2", "e2m1", "e3m0"]
INTEGERS = ["int8", "int4", "int2"]
BLOCKS = SCALED_FLOATS + INTEGERS
SPARSE = ["topk", "feddropout", "dare", "sparseloco", "pulse"]
NAMES = UNSCALED + BLOCKS + SPARSE
OTHER_BLOCKS = [f"{name}:block={(8, 640)[number % 2]}" for number, name in enumerate(BLOCKS)]
BLOCK_SPECS = BLOCKS + OTHER_BLOCKS
STOCHASTIC_SPECS = [f"{name}:stochastic=true" for name in BLOCKS]
SPARSE_SPECS = [f"topk:density=0.3,values={values}" for values in ("fp32", "bf16", "int4")]
SPARSE_SPECS += ["feddropout:density=0.3,values=bf16", "dare:density=0.3,values=int4"]
SPARSE_SPECS += ["sparseloco:block=256,k=64", "sparseloco:block=32,k=8", "sparseloco:block=36,k=36"]
SPARSE_SPECS += ["pulse:density=0.3", "pulse:values=int4,mask=fp32"]
SPECS = UNSCALED + BLOCK_SPECS + STOCHASTIC_SPECS + SPARSE_SPECS
IMPLEMENTATIONS = ["native", "torch"]


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Let the codecs run as compiled C, or as plain torch."""
    with ExitStack() as stack:
        for family in ("blocks", "floats", "sparse") if name == "torch" else ():
            stack.enter_context(patch(f"diloco.wire.{family}.native", lambda *_: None))
        yield


@st.composite
def vectors(draw, lengths=(0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 513, 700)):
    """Finite FP32 vectors: any bits at all, or magnitudes within some octaves, with ties and zeros among them."""
    length = draw(st.sampled_from(lengths))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sign = rng.integers(0, 2, length, np.uint32) << 31
    kind = draw(st.sampled_from(["bits", "octaves", "normal"]))
    if kind == "normal":
        return (rng.standard_normal(length) * 1e-4).astype(f32)
    if kind == "bits":
        bits = rng.integers(0, 0x7F800000, length, np.uint32)
    else:
        top = draw(st.integers(0, 254))
        exponent = np.clip(top - rng.integers(0, draw(st.integers(1, 20)), length), 0, 254).astype(np.uint32)
        halves = [0, 1, 0x1FFFFF, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF]
        mantissa = rng.choice(halves, length).astype(np.uint32)
        bits = exponent << 23 | mantissa
        bits[rng.random(length) < 0.1] = 0
    return (sign | bits).view(f32)


NO_KEY = Key()
KEYS = st.builds(
    Key,
    seed=st.integers(0, 2**64 - 1),
    fragment=st.integers(0, 2**16 - 1),
    round=st.integers(1, 2**32 - 1),
    replica=st.integers(0, 1000),
    part=st.integers(0, 2**16 - 1),
    shard=st.integers(0, 2**16 - 1),
)


def encode(
    spec: str, vector: np.ndarray, key: Key = NO_KEY, base: int = 0, outer: np.ndarray | None = None
) -> torch.Tensor:
    delta_N = torch.tensor(vector.tolist(), dtype=torch.float32)
    outer_N = None if outer is None else torch.tensor(outer.tolist(), dtype=torch.float32)
    return codec(spec).encode(delta_N, key, base=base, outer_N=outer_N)


def sealed(payload: torch.Tensor) -> torch.Tensor:
    """The payload, changed in place, with the checksum of what is in it."""
    whole = payload.numpy().tobytes()
    resealed = reference.sealed(whole[:24], whole[HEADER_BYTES:])
    payload[:HEADER_BYTES] = torch.frombuffer(bytearray(resealed[:HEADER_BYTES]), dtype=torch.uint8)
    return payload


def decode(spec: str, payload: torch.Tensor, num_elements: int, key: Key = NO_KEY) -> np.ndarray:
    decoded = codec(spec).decode(payload, num_elements, key)
    assert decoded.dtype == torch.float32
    return decoded.numpy()


def through(spec: str, vector: np.ndarray, key: Key = NO_KEY) -> np.ndarray:
    """decode(encode(Δ))."""
    return decode(spec, encode(spec, vector, key), len(vector), key)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.astype(f32).view(np.uint32))
