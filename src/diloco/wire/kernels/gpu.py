"""The functions of the triton_*.py, on torch's tensors, in the current stream."""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_BLOCK = 8192
"""Elements of the longest block that a program can hold."""
_PACKED = 2048
"""Elements that a program packs, if its blocks are short; with four warps among the best of ten on an H200."""
_UNPACKED = 512
"""Elements that a program unpacks; with two warps the best of eight settings on an H200."""


_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""A product and a sum are rounded one after the other, as torch rounds them."""


_UNPACK_OPTIONS = _OPTIONS | {"num_warps": 2}
_SIZE = 512
"""Elements of a program of the sparse codecs; with four warps the best of five settings on an H200."""
_CAST = 2048
"""Elements of a program of the codecs without a scale; with eight warps the best of five settings on an H200."""
_CAST_OPTIONS = _OPTIONS | {"num_warps": 8}
_HISTOGRAMS = 64
"""Histograms that programs add to in turns: with one, they would wait for each other."""
_GROUP = 64
"""The most elements of which Top-K's first histogram counts the largest."""
_CHUNK = 2048
"""Logits that a program reads at a time; with four warps the best of eight settings on an H200."""


_ROW_OPTIONS = {"num_warps": 4}


class GpuBlocks:
    """The functions of one block codec, on contiguous vectors.

    Args:
        constants: the codec's constants in triton_blocks.py.
    """

    def __init__(self, constants: Mapping[str, int | float]) -> None:
        from diloco.wire.kernels import triton_blocks  # where Triton is installed

        self._code: Any = triton_blocks
        self._constants = constants

    def pack(
        self, block: int, delta_N: Tensor, scales: Tensor, codes: Tensor, *, words: Sequence[int] | None = None
    ) -> Tensor:
        """Write scales and codes.

        Args:
            block: K.
            delta_N: the elements.
            scales: bytes of the scales.
            codes: bytes of the codes.
            words: `diloco.wire.payload.words`, by which elements are rounded at random; None rounds to nearest.

        Returns:
            A bool on the device: False if an element is not finite.
        """
        assert words is None or delta_N.numel() <= 1 << 34, "a counter's first word has 32 bits"
        typed, num_elements = self._typed(scales), delta_N.numel()
        bad = torch.zeros((), dtype=torch.int32, device=delta_N.device)
        columns = 1 << (block - 1).bit_length()
        rows = max(1, _PACKED // columns)
        choices = {"BLOCK": block, "ROWS": rows, "COLUMNS": columns, "STOCHASTIC": words is not None}
        if num_programs := -(-num_elements // (rows * block)):
            with _on(delta_N.device):
                start, values = self._code.pack[num_programs,], words or [0] * 5
                start(delta_N, typed, codes, bad, num_elements, *values, **choices, **self._constants, **_OPTIONS)
        if typed.data_ptr() != scales.data_ptr():
            scales.copy_(typed.view(torch.uint8))
        return bad == 0

    def unpack(self, block: int, scales: Tensor, codes: Tensor, to_N: Tensor, *, add: bool) -> Tensor:
        """Write the values, or add them; False on the device if `pack` never writes one of the scales or codes."""
        bad = torch.zeros((), dtype=torch.int32, device=to_N.device)
        tensors, sizes = (self._typed(scales), codes, to_N, bad), {"BLOCK": block, "SIZE": _UNPACKED}
        if num_programs := -(-to_N.numel() // _UNPACKED):
            with _on(to_N.device):
                start = self._code.unpack[num_programs,]
                start(*tensors, to_N.numel(), **sizes, **self._constants, ADD=add, **_UNPACK_OPTIONS)
        return bad == 0

    def _typed(self, scales: Tensor) -> Tensor:
        """The scales of small floats are bytes, those of integers FP32: a copy where these are not aligned."""
        return scales if self._constants["FLOAT"] else _typed(scales, torch.float32)


class GpuCasts:
    """The functions of one format without a scale, on contiguous vectors.

    Args:
        dtype: FP32, BF16 or FP16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        from diloco.wire.kernels import triton_casts  # where Triton is installed

        self._code, self._mantissa = triton_casts, round(-math.log2(torch.finfo(dtype).eps))
        self._codes = torch.int32 if dtype.itemsize == 4 else torch.int16

    def pack(self, delta_N: Tensor, body: Tensor) -> Tensor:
        """Write the elements in the format; False on the device if one is not finite."""
        typed = _typed(body, self._codes)
        is_finite = self._run(self._code.pack, (delta_N.view(torch.int32), typed))
        if typed.data_ptr() != body.data_ptr():
            body.copy_(typed.view(torch.uint8))
        return is_finite

    def unpack(self, body: Tensor, to_N: Tensor, *, add: bool) -> Tensor:
        """Write the values, or add them; False on the device if one is not finite."""
        return self._run(self._code.unpack, (_typed(body, self._codes), to_N), ADD=add)

    def _run(self, function: Any, tensors: tuple[Tensor, Tensor], **choices: bool) -> Tensor:
        num_elements, bad = tensors[0].numel(), torch.zeros((), dtype=torch.int32, device=tensors[0].device)
        if num_programs := -(-num_elements // _CAST):
            with _on(bad.device):
                start, sizes = function[num_programs,], {"MANTISSA": self._mantissa, "SIZE": _CAST}
                start(*tensors, bad, num_elements, **sizes, **choices, **_CAST_OPTIONS)
        return bad == 0


class GpuSparse:
    """The functions of the sparse codecs, on contiguous vectors; masks are those of diloco.wire.payload."""

    def __init__(self) -> None:
        from diloco.wire.kernels import triton_sparse  # where Triton is installed

        self._code = triton_sparse

    def masked(self, mask: Sequence[int], delta_N: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """The values that a mask keeps, then zeros, FP32 (room); False on the device if one is not finite."""
        kept = torch.zeros(room, dtype=torch.float32, device=delta_N.device)
        bad = torch.zeros((), dtype=torch.int32, device=delta_N.device)
        words = self._words(mask)
        ends = self._mask_ends(words, delta_N)
        tensors = delta_N, kept, ends, bad
        _start(self._code.mask_pack, delta_N.numel(), *tensors, delta_N.numel(), room, *words)
        return kept, bad == 0

    def spread(self, mask: Sequence[int], kept: Tensor, to_N: Tensor, *, add: bool) -> None:
        """Write zeros and the values that a mask kept, or add the values."""
        words = self._words(mask)
        tensors = kept, to_N, self._mask_ends(words, to_N)
        _start(self._code.mask_unpack, to_N.numel(), *tensors, to_N.numel(), kept.numel(), *words, ADD=add)

    def largest(self, delta_N: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest magnitudes, of equal ones the first.

        Returns:
            Their places, ascending, int64 (k); their values, FP32 (k); False on the device if an element is not
            finite.
        """
        device, num_elements = delta_N.device, delta_N.numel()
        bad = torch.zeros((), dtype=torch.int32, device=device)
        place_k = torch.empty(kept, dtype=torch.int64, device=device)
        kept_k = torch.empty(kept, dtype=torch.float32, device=device)
        threshold, num_ties = self._threshold(delta_N, kept, bad)
        above, equal = torch.empty(2, _num_programs(num_elements), dtype=torch.int32, device=device)
        _start(self._code.largest_counts, num_elements, delta_N, above, equal, threshold, num_elements)
        ends = above.cumsum(0), equal.cumsum(0)
        tensors = delta_N, place_k, kept_k, *ends, threshold, num_ties
        _start(self._code.largest_pack, num_elements, *tensors, num_elements)
        return place_k, kept_k, bad == 0

    def largest_of_blocks(
        self, delta_N: Tensor, block: int, kept: int, num_values: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `largest`, of each block its k, and of a shorter last one the same share; `num_values` in all."""
        num_elements, device = delta_N.numel(), delta_N.device
        bad = torch.zeros((), dtype=torch.int32, device=device)
        place_k = torch.empty(num_values, dtype=torch.int64, device=device)
        kept_k = torch.empty(num_values, dtype=torch.float32, device=device)
        if num_elements:
            sizes = {"BLOCK": block, "KEPT": kept, "SIZE": 1 << (block - 1).bit_length()}
            with _on(device):
                start: Any = self._code.block_pack
                start[-(-num_elements // block),](delta_N, place_k, kept_k, bad, num_elements, **sizes, **_OPTIONS)
        return place_k, kept_k, bad == 0

    def gated(self, delta_N: Tensor, outer_N: Tensor, *, is_bf16: bool) -> Tensor:
        """The elements by which Θ changes as BF16, or as FP32; zeros elsewhere."""
        to_N = torch.empty_like(delta_N)
        _start(self._code.gate, delta_N.numel(), delta_N, outer_N, to_N, delta_N.numel(), BF16=is_bf16)
        return to_N

    def _threshold(self, delta_N: Tensor, kept: int, bad: Tensor) -> tuple[Tensor, Tensor]:
        """The magnitude of the k-th largest, as an integer, and the number of those at it that are kept."""
        least = torch.zeros(1, dtype=torch.int32, device=delta_N.device)
        left = torch.full((1,), kept, dtype=torch.int64, device=delta_N.device)
        # At least twice as many groups as elements that are kept.
        group = min(_GROUP, 1 << max(0, (delta_N.numel() // (2 * max(1, kept))).bit_length() - 1))
        if group > 1:
            least, _ = self._last_bin(delta_N, bad, least, left, UPPER=True, GROUP=group)
        least, left = self._last_bin(delta_N, bad, least, left, UPPER=True, GROUP=1)
        threshold, left = self._last_bin(delta_N, bad, least, left, UPPER=False, GROUP=1)
        return least + threshold, left

    def _last_bin(
        self, delta_N: Tensor, bad: Tensor, least: Tensor, left: Tensor, **choices: int
    ) -> tuple[Tensor, Tensor]:
        """The least magnitude of the last bin from which on there are enough, and the number left for it."""
        bins = 1 << 15 if choices["UPPER"] else 1 << 16
        counts = torch.zeros(_HISTOGRAMS, bins, dtype=torch.int32, device=delta_N.device)
        tensors = delta_N, counts, least.clamp(min=1), bad
        _start(self._code.histogram, delta_N.numel(), *tensors, delta_N.numel(), COPIES=_HISTOGRAMS, **choices)
        from_bin_on = counts.sum(0).flip(0).cumsum(0).flip(0)
        # Where there are not enough, zeros, which are not counted, fill the first bin.
        chosen = ((from_bin_on >= left).sum().view(1) - 1).clamp_(min=0)
        above = torch.nn.functional.pad(from_bin_on, (0, 1)).gather(0, chosen + 1)
        return chosen.int() << (16 if choices["UPPER"] else 0), left - above

    def _mask_ends(self, words: Sequence[int], vector_N: Tensor) -> Tensor:
        """For each program, the number of elements up to its end that a mask keeps."""
        num_elements = vector_N.numel()
        counts = torch.empty(_num_programs(num_elements), dtype=torch.int32, device=vector_N.device)
        _start(self._code.mask_counts, num_elements, counts, num_elements, *words)
        return counts.cumsum(0)

    def _words(self, mask: Sequence[int]) -> list[int]:
        """A mask's numbers, as signed ones, for which Triton compiles but once."""
        return [(word ^ 1 << 31) - (1 << 31) for word in mask]


class GpuRows:
    """Sums over rows of logits, and their gradients.

    Shapes: R rows, V vocabulary.
    """

    def __init__(self) -> None:
        from diloco.wire.kernels import triton_rows  # where Triton is installed

        self._code = triton_rows

    def log_sums(self, logits_RxV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ exp of each row and the logit of its target, FP32 (R); NaN for a target that is no column.

        Args:
            logits_RxV: of any floating dtype.
            target_R: int64.
        """
        log_z_R, target_logit_R = torch.empty(2, len(logits_RxV), dtype=torch.float32, device=logits_RxV.device)
        self._run(self._code.log_sums, logits_RxV, target_R.contiguous(), log_z_R, target_logit_R)
        return log_z_R, target_logit_R

    def gradients(
        self, logits_RxV: Tensor, target_R: Tensor, log_z_R: Tensor, of_log_z_R: Tensor, of_target: Tensor
    ) -> Tensor:
        """The gradient for all logits (R, V), in their dtype; NaN in a row whose target is no column.

        Args:
            logits_RxV: as they were summed.
            target_R: as they were summed.
            log_z_R: their sums.
            of_log_z_R: the gradient for each of these, FP32.
            of_target: the gradient for each target's logit, an FP32 scalar.
        """
        gradient_RxV = torch.empty(logits_RxV.shape, dtype=logits_RxV.dtype, device=logits_RxV.device)
        others = target_R.contiguous(), log_z_R, of_log_z_R.contiguous(), of_target, gradient_RxV
        self._run(self._code.gradients, logits_RxV, *others)
        return gradient_RxV

    def _run(self, function: Any, logits_RxV: Tensor, *others: Tensor) -> None:
        logits_RxV = logits_RxV if logits_RxV.stride(-1) == 1 else logits_RxV.contiguous()
        num_rows, num_logits = logits_RxV.shape
        chunk = min(_CHUNK, 1 << (num_logits - 1).bit_length())
        if num_rows:
            with _on(logits_RxV.device):
                start = function[num_rows,]
                start(logits_RxV, *others, logits_RxV.stride(0), num_logits, CHUNK=chunk, **_ROW_OPTIONS)


def _typed(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as a vector of another dtype: a copy where they are not aligned."""
    return (memory.clone() if memory.storage_offset() % dtype.itemsize else memory).view(dtype)


def _num_programs(num_elements: int) -> int:
    return -(-num_elements // _SIZE)


def _start(function: Any, num_elements: int, *arguments: Any, **constants: int) -> None:
    """Start as many programs of _SIZE elements as there are."""
    if num_elements:
        with _on(arguments[0].device):
            function[_num_programs(num_elements),](*arguments, **constants, SIZE=_SIZE, **_OPTIONS)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu_blocks(constants: Mapping[str, int | float]) -> GpuBlocks | None:
    """The functions of a block codec; None, with one warning, where Triton or what it compiles with is missing."""
    return GpuBlocks(constants) if _has_triton() else None


def gpu_casts(dtype: torch.dtype) -> GpuCasts | None:
    """The functions of a format without a scale; None where `gpu_blocks` gives None."""
    return GpuCasts(dtype) if _has_triton() else None


def gpu_sparse() -> GpuSparse | None:
    """The functions of the sparse codecs; None where `gpu_blocks` gives None."""
    return GpuSparse() if _has_triton() else None


def gpu_rows() -> GpuRows | None:
    """The functions for rows of logits; None where `gpu_blocks` gives None."""
    return GpuRows() if _has_triton() else None


@functools.cache
def _has_triton() -> bool:
    """True if Triton is installed, and works for the GPU."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("gcc", "clang")))  # where Triton looks
    has_header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists()
    if importlib.util.find_spec("triton") is not None and has_compiler and has_header:
        return True
    warnings.warn(
        "Triton, or what it needs, gcc or clang and Python.h, is not installed: using slower PyTorch code on the "
        "GPU, with identical payloads, and a loss that differs by rounding",
        RuntimeWarning,
        stacklevel=4,
    )
    return False
