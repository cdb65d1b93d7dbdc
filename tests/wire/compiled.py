"""Compiles the codecs' references, in a process that checks no types, since that can't be traced.

python -m tests.wire.compiled
"""

from functools import partial

import torch

from diloco.wire import CODECS, codec
from diloco.wire.blocks import BlockCodec
from diloco.wire.compiled import COMPILE_OPTIONS, compile_alone
from diloco.wire.formats import HEADER_BYTES


def compare_bits(spec: str) -> None:
    torch.set_num_threads(1)
    wire = codec(spec)
    pack, unpack = (
        partial(compile_alone(type(wire), f"{name}_reference", options=COMPILE_OPTIONS), wire)
        for name in ("pack", "unpack")
    )
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


def count_graphs() -> None:
    """One graph of `pack` and two of `unpack` for each codec: together they are more than dynamo's limit."""
    graphs: list[str] = []
    kinds = [kind for kind in CODECS.values() if issubclass(kind, BlockCodec)]
    assert 2 * len(kinds) > torch._dynamo.config.recompile_limit
    for kind in kinds:

        def backend(graph: torch.fx.GraphModule, inputs: list, name: str = kind.name) -> object:
            graphs.append(name)
            return graph.forward

        pack, unpack = (compile_alone(kind, f"{name}_reference", backend=backend) for name in ("pack", "unpack"))
        for block, length in ((8, 33), (8, 1024), (32, 4097), (640, 1280)):
            wire, delta = kind(block=block), torch.linspace(-1, 1, length)
            payload = wire.encode(delta)
            end = HEADER_BYTES + wire.scales_bytes(length)
            scales, codes = torch.empty_like(payload[HEADER_BYTES:end]), torch.empty_like(payload[end:])
            pack(wire, delta, scales, codes, None)
            assert torch.equal(torch.cat([payload[:HEADER_BYTES], scales, codes]), payload)
            decoded = torch.empty(length)
            unpack(wire, scales, codes, decoded, False)
            assert torch.equal(decoded, wire.decode(payload, length))
            unpack(wire, scales, codes, delta, True)
    assert graphs == [kind.name for kind in kinds for _ in range(3)], graphs


if __name__ == "__main__":
    count_graphs()
    for spec in ("e3m0", "int4:stochastic=true"):
        compare_bits(spec)
