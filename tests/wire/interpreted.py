"""Triton's kernels, interpreted on the CPU, against the codecs there: the same bits of payloads and vectors.

TRITON_INTERPRET=1 python -m tests.wire.interpreted    # with those for rows of logits, of interpreted_rows.py
"""

from itertools import product
from unittest.mock import patch

import torch
from tests.wire import interpreted_rows
from torch import Tensor

from diloco.wire import CODECS, Key, codec
from diloco.wire.blocks import BlockCodec
from diloco.wire.kernels.gpu import GpuBlocks, GpuCasts, GpuSparse
from diloco.wire.payload import words

KEY = Key(seed=(0x9ABCDEF0 << 32) + 0xF0000003, fragment=2, round=3, replica=4, part=1, shard=2)
BLOCKS = [name for name in CODECS if getattr(codec(name), "constants", None)]
SPECS = [
    f"{name}:block={block},stochastic={stochastic}"
    for number, name in enumerate(BLOCKS)
    for block, stochastic in ((256, "false"), ((8, "true"), (640, "true"), (12, "false"))[number % 3])
]
"""Each codec with the default block, and the other forms of blocks in turns."""

NUMS = (1, 2309)
"""Elements; the last number is that of two programs, of which one is not full. To start one takes longer."""


def vector(num: int) -> Tensor:
    """Runs of normal numbers, of small and subnormal ones, of ties, and of any finite numbers at all."""
    generator = torch.Generator().manual_seed(num)
    limits = 2, 0x7F800000, 0x1800000
    signs, any_bits, small_bits = (
        torch.randint(0, limit, (num,), generator=generator, dtype=torch.int32) for limit in limits
    )
    ties = torch.randint(-16, 17, (num,), generator=generator) / 8
    kinds = [
        torch.randn(num, generator=generator),
        (small_bits | signs << 31).view(torch.float32),
        ties,
        (any_bits | signs << 31).view(torch.float32),
    ]
    return torch.stack(kinds)[torch.arange(num) // 97 % len(kinds), torch.arange(num)]


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def compare(spec: str, num: int) -> None:
    wire, delta_N = codec(spec), vector(num)
    assert isinstance(wire, BlockCodec) and wire.constants is not None
    kernels = GpuBlocks(wire.constants)
    end = wire.scales_bytes(num)
    expected = torch.empty(wire.body_bytes(num), dtype=torch.uint8)
    assert wire.pack(delta_N, expected, KEY)
    # Neither part begins at a multiple of four, as in the body of a sparse codec.
    body = torch.empty(expected.numel() + 2, dtype=torch.uint8)[1:-1]
    random_words = words(KEY, common=False) if wire.stochastic else None
    assert kernels.pack(wire.block, delta_N, body[:end], body[end:], words=random_words)
    assert same(body, expected), spec
    for add in (False, True) if num == NUMS[-1] else (False,):
        expected_N, decoded_N = torch.linspace(-1, 1, num), torch.linspace(-1, 1, num)
        assert wire.unpack(expected, expected_N, KEY, add=add)
        assert kernels.unpack(wire.block, body[:end], body[end:], decoded_N, add=add)
        assert same(decoded_N, expected_N), spec
    for place, value in ((0, torch.nan), (num // 2, torch.inf), (num - 1, -torch.inf)) if num == NUMS[-1] else ():
        broken_N = delta_N.clone()
        broken_N[place] = value
        assert not kernels.pack(wire.block, broken_N, body[:end], body[end:], words=random_words), spec


def compare_casts(name: str, num: int) -> None:
    wire, delta_N = codec(name), vector(num)
    kernels, expected = GpuCasts(wire.dtype), torch.empty(wire.body_bytes(num), dtype=torch.uint8)
    assert wire.pack(delta_N, expected, KEY)
    for start in (0, 1):  # at 1 the body is not aligned, as in that of a sparse codec
        body = torch.empty(expected.numel() + 1, dtype=torch.uint8)[start : start + expected.numel()]
        assert kernels.pack(delta_N, body)
        assert same(body, expected), name
    for add in (False, True):
        expected_N, decoded_N = torch.linspace(-1, 1, num), torch.linspace(-1, 1, num)
        assert wire.unpack(expected, expected_N, KEY, add=add)
        assert kernels.unpack(body, decoded_N, add=add)
        assert same(decoded_N, expected_N), name
    for value in (torch.nan, torch.inf, -torch.inf):
        broken_N = delta_N.clone()
        broken_N[num // 2] = value
        assert not kernels.pack(broken_N, body), name
        assert not kernels.unpack(broken_N.to(wire.dtype).view(torch.uint8), decoded_N, add=False), name


def compare_sparse(spec: str, delta_N: Tensor) -> None:
    wire, num = codec(spec), delta_N.numel()
    expected = wire.encode(delta_N, KEY)
    expected_N, added_N = wire.decode(expected, num, KEY), torch.linspace(-1, 1, num)
    wire.decode_into(added_N, expected, KEY, add=True)
    with patch("diloco.wire.sparse._kernels", lambda vector_N: GpuSparse()):
        assert same(wire.encode(delta_N, KEY), expected), spec
        assert same(wire.decode(expected, num, KEY), expected_N), spec
        assert same(wire.decode_into(torch.linspace(-1, 1, num), expected, KEY, add=True), added_N), spec
        broken_N = delta_N.clone()
        broken_N[num // 2] = torch.nan
        assert not wire.packed(broken_N, KEY)[1], spec


def compare_gates(num: int) -> None:
    delta_N, outer_N = vector(num), 100 * vector(num).roll(7)
    outer_N = outer_N.where(outer_N.isfinite(), -0.0)
    for spec in ("pulse:density=1", "pulse:density=1,mask=fp32"):
        wire = codec(spec)
        expected_N, is_bf16 = wire.gated(delta_N, outer_N), "mask" not in spec
        assert same(GpuSparse().gated(delta_N, outer_N, is_bf16=is_bf16), expected_N), spec
        assert num == 1 or 0 < expected_N.count_nonzero() < num, spec


def compare_damage(spec: str) -> None:
    """Change the first scale, the first and last codes: both see the same bytes that are never written."""
    wire, num, answers = codec(spec), 1001, set[bool]()
    assert isinstance(wire, BlockCodec) and wire.constants is not None
    kernels, end = GpuBlocks(wire.constants), wire.scales_bytes(num)
    whole = torch.empty(wire.body_bytes(num), dtype=torch.uint8)
    wire.pack(vector(num), whole, KEY)
    for place in (0, end, -1):
        for byte in (0, 0x7F, 0x80, 0xFF):
            body = whole.clone()
            body[place] = byte
            to_N = torch.zeros(num)
            expected = bool(wire.unpack(body, to_N, KEY, add=False))
            assert bool(kernels.unpack(wire.block, body[:end], body[end:], to_N, add=False)) == expected
            answers.add(expected)
    assert answers == {True, False}, spec


if __name__ == "__main__":
    torch.set_num_threads(1)
    for num in NUMS:
        for name in ("fp32", "bf16", "fp16"):
            compare_casts(name, num)
        for name, density in product(("topk", "feddropout", "dare"), (0.05, 1.0) if num > 1 else (1.0,)):
            compare_sparse(f"{name}:density={density}", vector(num))
        for sizes in ("block=640,k=64", "block=256,k=256"):
            compare_sparse(f"sparseloco:{sizes}", vector(num))
        compare_gates(num)
    few_magnitudes = torch.zeros(700), torch.ones(700), torch.arange(700.0) // 680
    for magnitudes in few_magnitudes:
        compare_sparse("topk:density=0.05", magnitudes)
        compare_sparse("sparseloco:block=256,k=64", magnitudes)
    compare_sparse("topk:density=0.001", few_magnitudes[-1])
    for spec in SPECS:
        for num in NUMS if "block=256" in spec else NUMS[1:]:
            compare(spec, num)
        if "block=256" in spec:
            compare_damage(spec)
    interpreted_rows.main()
