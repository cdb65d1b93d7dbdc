"""Compiles the codecs' references, in a process that checks no types, since that can't be traced.

python -m tests.wire.compiled bits: with inductor, as for a GPU; the bits must be the reference's.
python -m tests.wire.compiled graphs: all block codecs, without inductor; counts the graphs.
"""

import sys

import torch

from diloco.wire import codec
from diloco.wire.compiled import COMPILE_OPTIONS, compile_alone
from diloco.wire.formats import FORMATS, Blocks


def compare_bits(spec: str) -> None:
    torch.set_num_threads(1)
    wire = codec(spec)
    pack, unpack = (
        compile_alone(wire, method, options=COMPILE_OPTIONS) for method in ("pack_reference", "unpack_reference")
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
    """Each codec with its options has one graph for all lengths; together they are more than dynamo's limit."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(spec)
        return graph.forward

    specs = [f"{name}:block={block}" for name in FORMATS if issubclass(FORMATS[name], Blocks) for block in (8, 32)]
    assert len(specs) > torch._dynamo.config.recompile_limit
    for spec in specs:
        wire = codec(spec)
        pack, unpack = (
            compile_alone(wire, method, backend=backend) for method in ("pack_reference", "unpack_reference")
        )
        for length in (33, 1024, 4097):
            delta = torch.linspace(-1, 1, length)
            payload = wire.encode(delta)
            end = 16 + wire.scales_bytes(length)
            scales, codes = torch.empty_like(payload[16:end]), torch.empty_like(payload[end:])
            pack(delta, scales, codes, None)
            assert torch.equal(torch.cat([payload[:16], scales, codes]), payload)
            decoded = torch.empty(length)
            unpack(scales, codes, decoded, False)
            assert torch.equal(decoded, wire.decode(payload, length))
    assert graphs == [spec for spec in specs for _ in ("pack", "unpack")], graphs


if __name__ == "__main__":
    if sys.argv[1] == "graphs":
        count_graphs()
    else:
        for spec in ("e3m0", "int4:stochastic=true"):
            compare_bits(spec)
