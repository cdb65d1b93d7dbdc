"""Payloads that were changed on the way, or made by somebody who means harm.

pytest tests/hostile/test_payloads.py --hostile-examples 12000    # 1,020,000 mutations, some minutes
"""

import resource
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from tests.wire.cases import NAMES, sealed

from diloco.errors import PayloadError
from diloco.wire import Codec, Key, codec
from diloco.wire.formats import HEADER_BYTES

LENGTHS = (1, 2, 7, 33, 300)
SPECS = [*NAMES, "e3m0:block=8", "int8:block=3", "topk:density=0.3,values=int4", "dare:density=0.5,values=e4m3"]
HOSTILE = settings.get_profile("hostile")
MOST_BYTES = 100 << 20
"""Memory that all mutations of a format may take beside the tests' own; it holds torch's and C's caches."""


def mutation(random: np.random.Generator, kind: int, sound: np.ndarray, other: np.ndarray) -> np.ndarray:
    """A payload that was changed in one of `NUM_KINDS` ways."""
    payload, size = sound.copy(), len(sound)
    body = payload[HEADER_BYTES:]
    places = random.integers(0, size, random.integers(1, 9))
    start, end = sorted(random.integers(0, size + 1, 2))
    values = random.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF, int(random.integers(256))], len(places))
    match kind:
        case 0:  # bits
            np.bitwise_xor.at(payload, places, (1 << random.integers(0, 8, len(places))).astype(np.uint8))
        case 1:  # bytes
            payload[places] = values
        case 2:  # bytes of the body
            body[places % len(body)] = values
        case 3:  # two bytes in each other's place
            payload[places[:2]] = payload[places[:2][::-1]]
        case 4:  # a range cleared
            payload[start:end] = random.choice([0, 255])
        case 5:  # a range shifted
            payload[start:end] = np.roll(payload[start:end], random.integers(1, 9))
        case 6:  # a range copied elsewhere
            to = random.integers(0, size - (end - start) + 1)
            payload[to : to + end - start] = payload[start:end].copy()
        case 7:  # cut short
            payload = payload[: random.integers(0, size)]
        case 8:  # longer
            payload = np.concatenate([payload, random.integers(0, 256, random.integers(1, 99), np.uint8)])
        case 9:  # another's header, or a part of it
            part = random.choice([4, 8, 16, 24, HEADER_BYTES])
            payload[:part] = other[:part]
        case _:  # a body that was drawn
            body[:] = random.integers(0, 256, len(body), np.uint8)
    return payload


NUM_KINDS = 11


def payloads_of(wire: Codec, random: np.random.Generator) -> list[tuple[int, torch.Tensor]]:
    """Payloads of vectors of all lengths, small and as large as can be."""
    vectors = [(n, torch.from_numpy(random.standard_normal(n, np.float32))) for n in LENGTHS]
    largest = torch.finfo(torch.float32).max
    scales = (1e-3, largest / 8, 1e-3, largest / 8, 1.0)
    return [(n, wire.encode(delta * s, base=n)) for (n, delta), s in zip(vectors, scales, strict=True)]


def mutated(spec: str) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """N, a payload that differs from a sound one, and True if its checksum was made to match."""
    random = np.random.default_rng([*spec.encode()] if HOSTILE.derandomize else None)
    sound = payloads_of(codec(spec), random)
    others = [payload.numpy() for name in NAMES for _, payload in payloads_of(codec(name), random)]
    for i in range(len(sound) * HOSTILE.max_examples):
        n, payload = sound[random.integers(len(sound))]
        changed = mutation(random, i % NUM_KINDS, payload.numpy(), others[random.integers(len(others))])
        if np.array_equal(changed, payload.numpy()):
            continue
        tensor = torch.from_numpy(changed)
        is_sealed = len(changed) >= HEADER_BYTES and bool(random.integers(2))
        yield n, sealed(tensor) if is_sealed else tensor, is_sealed


def hex_of(payload: torch.Tensor) -> str:
    return payload.numpy().tobytes().hex()


def decoded(wire: Codec, payload: torch.Tensor, num_elements: int) -> torch.Tensor | None:
    """The vector; None if the payload is refused, as it must be: by a PayloadError, and by nothing else."""
    try:
        return wire.decode(payload, num_elements, Key(1, 2, 3))
    except PayloadError:
        return None


@pytest.mark.parametrize("spec", SPECS)
def test_no_changed_payload_is_taken_and_no_hostile_one_gives_a_number_that_is_not_finite(spec):
    wire, num_taken, num_tried = codec(spec), 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n, payload, is_sealed in mutated(spec):
        num_tried += 1
        vector = decoded(wire, payload, n)
        assert is_sealed or vector is None, (n, hex_of(payload))
        if vector is not None:
            num_taken += 1
            assert vector.isfinite().all(), (n, hex_of(payload))
    taken_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert taken_bytes < MOST_BYTES
    # Only what is sealed, of the right length and header, may be taken.
    assert 0.05 * num_tried < num_taken < 0.5 * num_tried, (num_taken, num_tried)
