"""The speed of a wheel's native code beside what is compiled for this very processor, in one run and in turns.

    python -m hatchling build -t wheel && python benchmarks/native_code.py dist/diloco-*.whl

Printed are ratios of medians of processor time on one thread: above 1, the wheel's code is slower. `same` is a
copy of the library that is compiled here: what the ratios scatter by.
"""

import argparse
import ctypes
import platform
import shutil
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from diloco.outer.digest import parameters_hash
from diloco.wire import CODECS, codec
from diloco.wire.kernels.compiling import features, variants
from diloco.wire.kernels.native import Native, compiled_library

USERS = ("wire.blocks", "wire.floats", "wire.sparse", "outer.step")


def main() -> None:
    """Print a row for each codec, and for the digest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--wires", nargs="*", default=list(CODECS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        functions = libraries(asked.wheel, Path(scratch))
        names = [name for name in functions if name != "here"]
        print(f"| work | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        vector = torch.randn(asked.values, generator=torch.Generator().manual_seed(0)) * 1e-3
        for work, call in [*works(asked.wires, vector), ("digest", lambda: parameters_hash({"a": vector}))]:
            seconds = medians(functions, call, asked.turns)
            ratios = (f"{seconds[name] / seconds['here']:.3f}" for name in names)
            print(f"| {work} | {' | '.join(ratios)} |", flush=True)


def libraries(wheel: Path, folder: Path) -> dict[str, Native]:
    """The libraries that can run here, by the names of variants; `here` and `same` are compiled here."""
    machine, here = platform.machine(), Path(compiled_library()._name)
    paths = {"here": here, "same": Path(shutil.copy(here, folder / "same.so"))}
    with zipfile.ZipFile(wheel) as archive:
        for variant in (one for one in variants(machine) if one.needs <= features()):
            name = f"diloco/wire/kernels/{variant.file(machine)}"
            paths[variant.name] = Path(archive.extract(name, folder))
    return {name: Native(ctypes.CDLL(str(path))) for name, path in paths.items()}


def works(wires: list[str], vector: torch.Tensor) -> list[tuple[str, Callable[[], object]]]:
    """The calls that are timed for each codec."""
    calls: list[tuple[str, Callable[[], object]]] = []
    for wire in wires:
        one, to = codec(wire), torch.zeros_like(vector)
        payload = one.encode(vector)
        calls.append((f"encode {wire}", lambda one=one: one.encode(vector)))
        calls.append(
            (f"decode {wire}", lambda one=one, payload=payload, to=to: one.decode_into(to, payload, add=True))
        )
    return calls


def medians(functions: dict[str, Native], call: Callable[[], object], turns: int) -> dict[str, float]:
    """Median seconds of a call with each library, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name in functions if turn % 2 else reversed(functions):
            with ExitStack() as stack:
                for user in USERS:
                    stack.enter_context(patch(f"diloco.{user}.native", return_value=functions[name]))
                began = time.process_time()
                call()
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(some[1:]) for name, some in seconds.items()}  # the first one warms up


if __name__ == "__main__":
    main()
