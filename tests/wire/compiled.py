"""Compiles a codec's reference, as for a GPU, and compares the bits: python -m tests.wire.compiled SPEC."""

import sys

import torch

from diloco.wire import codec
from diloco.wire.compiled import COMPILE_OPTIONS


def main(spec: str) -> None:
    torch.set_num_threads(1)
    wire = codec(spec)
    options = {"dynamic": True, "fullgraph": True, "options": COMPILE_OPTIONS}
    pack, unpack = (torch.compile(f, **options) for f in (wire.pack_reference, wire.unpack_reference))
    for length in (700, 1024):
        generator = torch.Generator().manual_seed(length)
        delta = torch.randint(0, 0x7F800000, (length,), generator=generator, dtype=torch.int32).view(torch.float32)
        random = torch.randint(0, 2**32, (length,), generator=generator) if wire.stochastic else None
        num_bytes = (-(-length // wire.block) * wire.scale_bytes, length // 2)
        scales, codes = (torch.empty(n, dtype=torch.uint8) for n in num_bytes)
        expected = torch.empty_like(scales), torch.empty_like(codes)
        wire.pack_reference(delta, *expected, random)
        pack(delta, scales, codes, random)
        assert torch.equal(scales, expected[0]) and torch.equal(codes, expected[1])
        total = torch.linspace(-1, 1, length)
        mine = total.clone()
        assert wire.unpack_reference(scales, codes, total, True) and unpack(scales, codes, mine, True)
        assert torch.equal(mine.view(torch.int32), total.view(torch.int32))


if __name__ == "__main__":
    main(sys.argv[1])
