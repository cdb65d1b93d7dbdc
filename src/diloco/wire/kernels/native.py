"""The functions of native.c, on torch's tensors.

Each gives the bits of the plain torch code beside which it is used, and replaces it where a wheel brought the
library, or there is a C compiler.
"""

import ctypes
import fcntl
import functools
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.files import sha256, write_atomically
from diloco.wire.kernels.compiling import (
    FLAGS,
    SOURCE,
    SOURCES,
    THIS_PROCESSOR,
    compile_native,
    compiler,
    features,
    processor_lines,
    variants,
)
from diloco.wire.kernels.memory import empty

T = TypeVar("T")


def shipped_library() -> ctypes.CDLL | None:
    """The fastest library for this processor that came with the package, in a wheel; None if there is none."""
    machine, there = platform.machine(), features()
    for variant in variants(machine):
        library = SOURCE.with_name(variant.file(machine))
        if variant.needs <= there and library.exists():
            with suppress(OSError):  # of another C library
                return ctypes.CDLL(str(library))
    return None


def compiled_library() -> ctypes.CDLL:
    """The library of this source, compiler and processor, from the user's cache or compiled now.

    Raises:
        OSError: if there is no compiler, or it fails, or what it makes can't be loaded.
        subprocess.SubprocessError: if the compiler does not end.
    """
    command = compiler()
    identity = repr(
        (
            [source.read_bytes() for source in SOURCES],
            command,
            FLAGS,
            THIS_PROCESSOR,
            platform.machine(),
            _processor(),
        )
    )
    name = f"native-{sha256(identity.encode())[:16]}.so"
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco" / name
    if (library := _loaded(cached)) is not None:
        return library
    with tempfile.TemporaryDirectory() as scratch, _alone_in(cached.parent):
        if (library := _loaded(cached)) is not None:  # another process has compiled it meanwhile
            return library
        made = Path(scratch) / name
        compile_native(command, THIS_PROCESSOR, made, SOURCE)
        try:
            write_atomically(cached, [made.read_bytes()])
            return ctypes.CDLL(str(cached))
        except OSError:  # the home can't be written to, or nothing there can be run: for this process alone
            return ctypes.CDLL(str(made))  # which stays when its file is gone


def _loaded(cached: Path) -> ctypes.CDLL | None:
    """The library of a file; None if there is none, or it is cut short, or of another C library."""
    with suppress(OSError):
        return ctypes.CDLL(str(cached)) if cached.exists() else None
    return None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let the processes of a machine compile one after another, where its file system has locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the compiler of another one ends, whose time is bounded
        yield


def _processor() -> str:
    """The properties of the processor on which -march=native depends."""
    lines = processor_lines(("model name", "flags", "Features", "CPU part"))
    return repr(sorted(lines)) if lines else platform.processor()


OUTER_STEPS = {torch.float32: "outer_step", torch.bfloat16: "outer_step_bf16"}
"""The function for each dtype of θ."""

# With fewer elements a thread ends before the next one has started.
_ELEMENTS_PER_THREAD = 1 << 20


class Native:
    """The functions of native.c, on contiguous CPU tensors, with as many threads as torch has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.path = Path(library._name)
        """The library: beside native.c if it came in a wheel, else compiled for this processor."""

    def has(self, name: str) -> bool:
        """True if native.c has the function, such as `e3m0_pack` or `outer_step`."""
        return hasattr(self._library, name)

    def pack(self, name: str, block: int, delta_N: Tensor, scales: Tensor, codes: Tensor) -> bool:
        """Write the scales and codes of the block codec `name`; False if an element is not finite."""
        pack = self.function(f"{name}_pack", c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        addresses = self._addresses(name, block, scales, codes, delta_N)

        def call(start: int, length: int) -> bool:
            scales_at, codes_at, delta_at = addresses(start)
            return pack(delta_at, length, block, scales_at, codes_at) == 0

        return _on_threads(call, delta_N.numel(), block)

    def unpack(self, name: str, block: int, scales: Tensor, codes: Tensor, to_N: Tensor, *, add: bool) -> bool:
        """Write the values, or add them; False if `pack` never writes one of the scales or codes."""
        unpack = self.function(f"{name}_unpack", c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int)
        addresses = self._addresses(name, block, scales, codes, to_N)

        def call(start: int, length: int) -> bool:
            scales_at, codes_at, to_at = addresses(start)
            return unpack(scales_at, codes_at, length, block, to_at, add) == 0

        return _on_threads(call, to_N.numel(), block)

    def cast_pack(self, name: str, delta_N: Tensor, body: Tensor) -> bool:
        """Write the elements in the format `name`, which has no scale; False if one is not finite."""
        pack, size = self.function(f"{name}_pack", c_void_p, c_int64, c_void_p), body.numel() // delta_N.numel()

        def call(start: int, length: int) -> bool:
            return pack(delta_N.data_ptr() + 4 * start, length, body.data_ptr() + size * start) == 0

        return _on_threads(call, delta_N.numel(), 16)

    def cast_unpack(self, name: str, body: Tensor, to_N: Tensor, *, add: bool) -> bool:
        """Write the values, or add them; False if one is not finite."""
        unpack = self.function(f"{name}_unpack", c_void_p, c_int64, c_void_p, c_int)
        size = body.numel() // to_N.numel()

        def call(start: int, length: int) -> bool:
            return unpack(body.data_ptr() + size * start, length, to_N.data_ptr() + 4 * start, add) == 0

        return _on_threads(call, to_N.numel(), 16)

    def outer_step(self, vectors: Sequence[Tensor], scalars: Sequence[float]) -> None:
        """Update Θ, v and θ in place from Σ Δ, in `diloco.outer.nesterov`'s rule.

        Args:
            vectors: Θ, v, Σ Δ, θ of N elements each, FP32; θ may be BF16.
            scalars: M, η, μ, α, 1 − α.
        """
        dtype = vectors[3].dtype if vectors[3].dtype in OUTER_STEPS else torch.float32
        dtypes = (*[torch.float32] * 3, dtype)
        for name, vector, expected in zip(("Θ", "v", "Σ Δ", "θ"), vectors, dtypes, strict=True):
            _check_reach(name, vector, expected, vectors[0].numel())
        step = self.function(OUTER_STEPS[dtype], *[c_void_p] * 4, c_int64, *[c_float] * 5)

        def call(start: int, length: int) -> bool:
            step(*(vector.data_ptr() + vector.itemsize * start for vector in vectors), length, *scalars)
            return True

        _on_threads(call, vectors[0].numel(), 16)

    def outer_digest(self, outer_N: Tensor, block: int) -> int:
        """The digest of Θ in `diloco.outer.digest`, whose blocks have `block` elements."""
        _check_reach("Θ", outer_N, torch.float32, outer_N.numel())
        digest = self.function("outer_digest", c_void_p, c_int64, c_uint64, result=c_uint64)
        parts: list[int] = []

        def call(start: int, length: int) -> bool:
            parts.append(digest(outer_N.data_ptr() + 4 * start, length, start // block))
            return True

        _on_threads(call, outer_N.numel(), block)
        return sum(parts) % (1 << 64)

    def function(self, name: str, *types: type, result: type = c_int) -> Callable[..., int]:
        """A function of native.c."""
        function = getattr(self._library, name)
        if function.argtypes is None:  # set once: ctypes frees the old ones, which another thread's call may read
            function.restype = result
            function.argtypes = types
        return function

    def _addresses(
        self, name: str, block: int, scales: Tensor, codes: Tensor, vector_N: Tensor
    ) -> Callable[[int], tuple[int, int, int]]:
        """The addresses of scales, codes and elements of a block, as a function of the block's first element.

        Raises:
            PayloadError: if memory beyond the tensors would be reached.
        """
        num_elements = vector_N.numel()
        bits, scale_bytes = (
            c_int.in_dll(self._library, f"{name}_{constant}").value for constant in ("bits", "scale_bytes")
        )
        assert block > 0 and block * bits % 8 == 0, "a block ends with a byte"
        _check_reach("the vector", vector_N, torch.float32, num_elements)
        _check_reach("the scales", scales, torch.uint8, -(-num_elements // block) * scale_bytes)
        _check_reach("the codes", codes, torch.uint8, -(-num_elements * bits // 8))
        return lambda start: (
            scales.data_ptr() + start // block * scale_bytes,
            codes.data_ptr() + start * bits // 8,
            vector_N.data_ptr() + 4 * start,
        )


def _check_reach(name: str, tensor: Tensor, dtype: torch.dtype, num_elements: int) -> None:
    """Refuse a tensor whose address must not be taken.

    Raises:
        PayloadError: if it has another length, dtype, device or layout than its reader takes for granted.
    """
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.data_ptr() % dtype.itemsize
    if not is_plain or tensor.dtype != dtype or tensor.numel() != num_elements:
        raise PayloadError(
            f"{name}, {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, must be {num_elements} of "
            f"{dtype}, contiguous and aligned on the CPU"
        )


def _on_threads(call: Callable[[int, int], bool], num_elements: int, unit: int) -> bool:
    """Call a function on the `ranges` of N elements; True if all calls are."""
    return all(on_threads(call, ranges(num_elements, unit)))


def ranges(num_elements: int, unit: int) -> list[tuple[int, int]]:
    """(start, length) of a range per thread, which begins at a multiple of `unit`; at least one."""
    num_threads = max(1, min(torch.get_num_threads(), num_elements // _ELEMENTS_PER_THREAD))
    size = max(1, -(-num_elements // (num_threads * unit))) * unit
    return [(start, min(size, num_elements - start)) for start in range(0, max(1, num_elements), size)]


def on_threads(call: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """The results of calls with these arguments, each on a thread of its own."""
    if len(arguments) == 1:
        return [call(*arguments[0])]
    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(lambda some: call(*some), arguments))


@functools.cache
def native() -> Native | None:
    """The compiled functions; None, with one warning, where native.c can't be compiled or loaded."""
    try:
        if sys.byteorder != "little":
            raise OSError("the processor is big-endian")
        return Native(shipped_library() or compiled_library())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            "native.c could not be compiled or loaded: using slower PyTorch code with identical results "
            f"({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


CPU = torch.device("cpu")
_MASK = (c_void_p, c_int64, c_int64, c_uint32, c_uint32, c_uint32, c_int64, c_void_p)


class NativeSparse:
    """The functions of the sparse codecs, on contiguous CPU tensors; masks are those of diloco.wire.payload."""

    def __init__(self, compiled: Native) -> None:
        self._function = compiled.function

    def masked(self, mask: Sequence[int], delta_N: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """The values that a mask keeps, then zeros, FP32 (room); False if an element is not finite."""
        kept, pack = torch.zeros(room, dtype=torch.float32, device=CPU), self._function("mask_pack", *_MASK)

        def call(start: int, length: int, before: int) -> bool:
            addresses = delta_N.data_ptr() + 4 * start, kept.data_ptr() + 4 * before
            return not pack(addresses[0], start, length, *mask, room - before, addresses[1])

        are_finite = all(on_threads(call, self._mask_ranges(mask, delta_N.numel())))
        return kept, torch.tensor(are_finite, dtype=torch.bool, device=CPU)

    def spread(self, mask: Sequence[int], kept: Tensor, to_N: Tensor, *, add: bool) -> None:
        """Write zeros and the values that a mask kept, or add the values."""
        unpack = self._function("mask_unpack", *_MASK, c_int)

        def call(start: int, length: int, before: int) -> int:
            addresses = to_N.data_ptr() + 4 * start, kept.data_ptr() + 4 * before
            return unpack(addresses[0], start, length, *mask, kept.numel() - before, addresses[1], add)

        on_threads(call, self._mask_ranges(mask, to_N.numel()))

    def largest(self, delta_N: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest magnitudes, of equal ones the first.

        Returns:
            Their places, ascending, int64 (k); their values, FP32 (k); False if an element is not finite.
        """
        place_k = torch.empty(kept, dtype=torch.int64, device=CPU)
        kept_k = torch.empty(kept, dtype=torch.float32, device=CPU)
        count = self._function("topk_count", c_void_p, c_int64, c_uint32, c_void_p)
        select = self._function("topk_select", c_void_p, *[c_int64] * 2, c_uint32, c_int64, *[c_void_p] * 2)
        if not kept:
            return place_k, kept_k, torch.ones((), dtype=torch.bool, device=CPU)
        threshold, ties, are_finite = self._threshold(delta_N, kept)

        def counts(start: int, length: int) -> tuple[int, int]:
            counts = torch.zeros(2, dtype=torch.int64, device=CPU)
            count(delta_N.data_ptr() + 4 * start, length, threshold, counts.data_ptr())
            above, equal = counts.tolist()
            return above, equal

        def call(start: int, length: int, before: int, num_ties: int) -> int:
            addresses = kept_k.data_ptr() + 4 * before, place_k.data_ptr() + 8 * before
            return select(delta_N.data_ptr() + 4 * start, start, length, threshold, num_ties, *addresses)

        parts, before, arguments = ranges(delta_N.numel(), 64), 0, list[tuple[int, ...]]()
        several = on_threads(counts, parts) if len(parts) > 1 else [(kept - ties, ties)]
        for part, (above, equal) in zip(parts, several, strict=True):
            num_ties = min(equal, ties)
            arguments.append((*part, before, num_ties))
            before, ties = before + above + num_ties, ties - num_ties
        on_threads(call, arguments)
        return place_k, kept_k, torch.tensor(are_finite, dtype=torch.bool, device=CPU)

    def largest_of_blocks(
        self, delta_N: Tensor, block: int, kept: int, num_values: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `largest`, of each block its k, and of a shorter last one the same share; `num_values` in all."""
        place_k = torch.empty(num_values, dtype=torch.int64, device=CPU)
        kept_k = torch.empty(num_values, dtype=torch.float32, device=CPU)
        select = self._function("blocks_select", c_void_p, *[c_int64] * 4, *[c_void_p] * 2)

        def call(start: int, length: int) -> bool:
            before = start // block * kept
            addresses = kept_k.data_ptr() + 4 * before, place_k.data_ptr() + 8 * before
            return not select(delta_N.data_ptr() + 4 * start, start, length, block, kept, *addresses)

        are_finite = all(on_threads(call, ranges(delta_N.numel(), block)))
        return place_k, kept_k, torch.tensor(are_finite, dtype=torch.bool, device=CPU)

    def gated(self, delta_N: Tensor, outer_N: Tensor, *, is_bf16: bool) -> Tensor:
        """The elements by which Θ changes as BF16, or as FP32; zeros elsewhere."""
        gate = self._function("gate", *[c_void_p] * 2, c_int64, c_int, c_void_p)
        to_N = empty(delta_N.numel(), torch.float32, CPU)

        def call(start: int, length: int) -> int:
            vector, outer, to = (vector.data_ptr() + 4 * start for vector in (delta_N, outer_N, to_N))
            return gate(vector, outer, length, is_bf16, to)

        on_threads(call, ranges(delta_N.numel(), 16))
        return to_N

    def pack_places(self, place_k: Tensor, num_low: int, low: Tensor, high: Tensor) -> None:
        """Write the places of Top-K: the low bits of each, then the bit vector."""
        pack = self._function("places_pack", c_void_p, c_int64, c_int, c_void_p, c_void_p)
        pack(place_k.data_ptr(), place_k.numel(), num_low, low.data_ptr(), high.zero_().data_ptr())

    def unpack_places(
        self, place_k: Tensor, num_low: int, low: Tensor, high: Tensor, sizes: tuple[int, int]
    ) -> bool:
        """Read them; False if they are not k ascending ones below N.

        Args:
            place_k: zeros.
            num_low: low bits of a place.
            low: memory of these.
            high: memory of the bit vector.
            sizes: bits of that vector, and N.
        """
        unpack = self._function("places_unpack", *[c_void_p] * 2, *[c_int64] * 2, c_int, c_int64, c_void_p)
        where = place_k.numel(), num_low, sizes[1], place_k.data_ptr()
        return not unpack(low.data_ptr(), high.data_ptr(), sizes[0], *where)

    def write(self, place_k: Tensor, kept_k: Tensor, to_N: Tensor, *, add: bool) -> None:
        """Write the values in their places, or add them."""
        write = self._function("places_write", *[c_void_p] * 2, c_int64, c_void_p, c_int)
        write(place_k.data_ptr(), kept_k.data_ptr(), kept_k.numel(), to_N.data_ptr(), add)

    def _mask_ranges(self, mask: Sequence[int], num_elements: int) -> list[tuple[int, int, int]]:
        """Start and length of each thread's range, and the number of elements before it that a mask keeps."""
        count = self._function("mask_count", *[c_int64] * 2, *[c_uint32] * 3, result=c_int64)
        parts, before = ranges(num_elements, 64), 0
        counts = on_threads(lambda start, length: count(start, length, *mask), parts) if len(parts) > 1 else [0]
        placed = list[tuple[int, int, int]]()
        for (start, length), number in zip(parts, counts, strict=True):
            placed.append((start, length, before))
            before += number
        return placed

    def _threshold(self, delta_N: Tensor, kept: int) -> tuple[int, int, bool]:
        """The magnitude of the k-th largest, as an integer; the number of those at it that are kept.

        Also False if an element is not finite.
        """
        upper = self._histogram(delta_N, -1, 1 << 15)
        upper_bits, left = _last_bin(upper, kept)
        lower_bits, left = _last_bin(self._histogram(delta_N, upper_bits, 1 << 16), left)
        return upper_bits << 16 | lower_bits, left, not upper[0x7F80:].any()

    def _histogram(self, delta_N: Tensor, upper_bits: int, num_bins: int) -> Tensor:
        """The number of magnitudes per value of their upper bits."""
        histogram = self._function("topk_histogram", c_void_p, c_int64, c_int32, c_void_p)
        parts = ranges(delta_N.numel(), 64)
        counts = torch.zeros(len(parts), num_bins, dtype=torch.int64, device=CPU)

        def call(number: int, start: int, length: int) -> int:
            return histogram(delta_N.data_ptr() + 4 * start, length, upper_bits, counts[number].data_ptr())

        on_threads(call, [(number, *part) for number, part in enumerate(parts)])
        return counts.sum(0)


def _last_bin(counts: Tensor, kept: int) -> tuple[int, int]:
    """The last bin from which on there are enough, and the number that is left for it."""
    from_bin_on = counts.flip(0).cumsum(0).flip(0)
    chosen = int((from_bin_on >= kept).sum()) - 1
    return chosen, kept - int(from_bin_on[chosen] - counts[chosen])
