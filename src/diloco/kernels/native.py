"""Passes over CPU memory for which plain torch takes several, compiled from native.c when they are first needed.

Each gives the bits of the plain torch beside which it is used, and takes its place where there is a C compiler.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_PROCESSOR_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())

# With fewer elements a thread is done before the next one has started.
_ELEMENTS_A_THREAD = 1 << 20


class Native:
    """The functions of native.c, on contiguous CPU tensors, with as many threads as torch has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def pack(self, name: str, block: int, delta_N: Tensor, scales: Tensor, codes: Tensor) -> bool:
        """Write the scales and codes of a codec with a scale a block; False if an element is not finite."""
        pack = self._function(f"{name}_pack", c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        at = _addresses(block, scales, codes, delta_N)

        def call(start: int, length: int) -> bool:
            scales_at, codes_at, delta_at = at(start)
            return pack(delta_at, length, block, scales_at, codes_at) == 0

        return _on_threads(call, delta_N.numel(), block)

    def unpack(self, name: str, block: int, scales: Tensor, codes: Tensor, to_N: Tensor, *, add: bool) -> bool:
        """Write the values, or add them; False if a scale or a code is never written by `pack`."""
        unpack = self._function(f"{name}_unpack", c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int)
        at = _addresses(block, scales, codes, to_N)

        def call(start: int, length: int) -> bool:
            scales_at, codes_at, to_at = at(start)
            return unpack(scales_at, codes_at, length, block, to_at, add) == 0

        return _on_threads(call, to_N.numel(), block)

    def outer_step(self, vectors: Sequence[Tensor], scalars: Sequence[float]) -> None:
        """Of Θ, v, Σ Δ and θ all but Σ Δ in place; scalars are M, η, μ, α, 1 − α: see `diloco.outer.nesterov`."""
        step = self._function("outer_step", *[c_void_p] * 4, c_int64, *[c_float] * 5)

        def call(start: int, length: int) -> bool:
            step(*(vector.data_ptr() + 4 * start for vector in vectors), length, *scalars)
            return True

        _on_threads(call, vectors[0].numel(), 16)

    def _function(self, name: str, *types: type) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes = types
        return function


def _addresses(
    block: int, scales: Tensor, codes: Tensor, vector_N: Tensor
) -> Callable[[int], tuple[int, int, int]]:
    """Where scales, codes and elements of the block that starts at an element are."""
    num_elements = vector_N.numel()
    num_blocks = max(1, -(-num_elements // block))
    scale_bytes, codes_a_byte = scales.numel() // num_blocks, -(-num_elements // max(1, codes.numel()))
    return lambda start: (
        scales.data_ptr() + start // block * scale_bytes,
        codes.data_ptr() + start // max(1, codes_a_byte),
        vector_N.data_ptr() + 4 * start,
    )


def _on_threads(call: Callable[[int, int], bool], num_elements: int, unit: int) -> bool:
    """Call it on (start, length) of ranges that begin at multiples of `unit`; whether all calls were true."""
    num_threads = min(torch.get_num_threads(), num_elements // _ELEMENTS_A_THREAD)
    if num_threads < 2:
        return call(0, num_elements)
    size = -(-num_elements // (num_threads * unit)) * unit
    starts = range(0, num_elements, size)
    with ThreadPoolExecutor(num_threads) as threads:
        return all(list(threads.map(lambda i: call(i, min(size, num_elements - i)), starts)))


@functools.cache
def native() -> Native | None:
    """The compiled functions; None, and one warning, where they can't be had."""
    try:
        if sys.byteorder != "little":
            raise OSError("the processor is big-endian")
        return Native(ctypes.CDLL(str(_compiled())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"diloco goes on with slower code of the same results, since native.c was not compiled: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compiled() -> Path:
    """The library of this source, compiler and processor, from the user's cache or made now.

    Raises:
        OSError: saying why there is none.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or list(filter(shutil.which, ("cc", "gcc", "clang")))[:1]
    if not compiler:
        raise OSError("no C compiler was found (install gcc or clang, or name one in CC)")
    source = Path(__file__).with_suffix(".c")
    identity = repr((source.read_bytes(), compiler, _FLAGS, _PROCESSOR_FLAGS, platform.machine(), _processor()))
    name = f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco"
    if (cache / name).exists():
        return cache / name
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / name
        _compile(compiler, source, library)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            partial = cache / f"{name}.{os.getpid()}"
            shutil.copy(library, partial)
            return partial.replace(cache / name)
        except OSError:  # a home that can't be written to: for this process alone, then
            return Path(shutil.copy(library, tempfile.mkdtemp(prefix="diloco-")))


def _compile(compiler: list[str], source: Path, output: Path) -> None:
    complaint = ""
    for processor_flags in _PROCESSOR_FLAGS:
        command = [*compiler, *_FLAGS, *processor_flags, str(source), "-o", str(output), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            return
        complaint = " ".join(done.stderr.split())[-300:]
    raise OSError(f"{shlex.join(compiler)} failed: {complaint}")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return repr(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
