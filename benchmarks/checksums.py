"""The cost of checksums: encode and decode with and without them, in turns, as ratios to the speed of a copy.

    python benchmarks/checksums.py [--values N ...] [--wire SPEC] [--repeats R]

Best of the repeats, on one thread: other programs only ever make a run longer.
"""

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch

from diloco.outer.step import outer_digest
from diloco.wire import Codec, codec
from diloco.wire.kernels.memory import empty
from diloco.wire.payload import checksum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, nargs="+", default=[1 << 24, 1 << 25])
    parser.add_argument("--wire", default="e3m0")
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for num_values in arguments.values:
        best = shortest_seconds(codec(arguments.wire), num_values, arguments.repeats)
        ratios = "  ".join(f"{name} {best['copy'] / seconds:.2f}" for name, seconds in best.items())
        print(f"{num_values:,} values, copy {4e-9 * num_values / best['copy']:.1f} GB/s; of a copy: {ratios}")


def shortest_seconds(wire: Codec, num_values: int, repeats: int) -> dict[str, float]:
    delta_N, total_N = (empty(num_values, torch.float32, torch.device("cpu")).normal_(std=1e-3) for _ in range(2))
    payload = wire.encode(delta_N)
    best: dict[str, float] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)

    for repeat in range(2 * repeats):
        measure("copy", lambda: np.copyto(total_N.numpy(), delta_N.numpy()))
        if repeat % 2:
            measure("encode", lambda: wire.encode(delta_N))
            measure("decode and add", lambda: wire.decode_into(total_N, payload, add=True))
        else:
            with patch("diloco.wire.payload.checksum", return_value=0), patch.object(Codec, "check"):
                measure("encode without", lambda: wire.encode(delta_N))
                measure("decode and add without", lambda: wire.decode_into(total_N, payload, add=True))
        measure("checksum of the payload", lambda: checksum(payload))
        measure("digest of Θ", lambda: outer_digest(delta_N))
    return best


if __name__ == "__main__":
    main()
