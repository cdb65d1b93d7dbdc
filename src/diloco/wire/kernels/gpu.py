"""The functions of triton_blocks.py and triton_rows.py, on torch's tensors, in the current stream."""

import functools
import importlib.util
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


_ELEMENTS = 2048
"""Elements of a program whose blocks are short; four warps are among the best of ten settings on an H200."""


_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""A product and a sum are rounded one after the other, as torch rounds them."""


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

        self._code, self._constants = triton_blocks, constants

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
        typed = self._typed(scales)
        tensors, values = (delta_N, typed, codes), words or [0] * 5
        is_finite = self._run(self._code.pack, tensors, delta_N, block, *values, STOCHASTIC=words is not None)
        if typed.data_ptr() != scales.data_ptr():
            scales.copy_(typed.view(torch.uint8))
        return is_finite

    def unpack(self, block: int, scales: Tensor, codes: Tensor, to_N: Tensor, *, add: bool) -> Tensor:
        """Write the values, or add them; False on the device if `pack` never writes one of the scales or codes."""
        return self._run(self._code.unpack, (self._typed(scales), codes, to_N), to_N, block, ADD=add)

    def _typed(self, scales: Tensor) -> Tensor:
        """The scales of small floats are bytes, those of integers FP32: a copy where these are not aligned."""
        if self._constants["FLOAT"]:
            return scales
        return (scales.clone() if scales.storage_offset() % 4 else scales).view(torch.float32)

    def _run(
        self,
        function: Any,
        tensors: Sequence[Tensor],
        vector_N: Tensor,
        block: int,
        *values: int,
        **choices: bool,
    ) -> Tensor:
        """Start as many programs as there are rows of blocks; True on the device if none was bad."""
        device, num_elements = vector_N.device, vector_N.numel()
        bad = torch.zeros((), dtype=torch.int32, device=device)
        columns = 1 << (block - 1).bit_length()
        rows = max(1, _ELEMENTS // columns)
        sizes = {"BLOCK": block, "ROWS": rows, "COLUMNS": columns}
        if num_programs := -(-num_elements // (rows * block)):
            with _on(device):
                start = function[num_programs,]
                start(*tensors, bad, num_elements, *values, **sizes, **self._constants, **choices, **_OPTIONS)
        return bad == 0


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


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu_blocks(constants: Mapping[str, int | float]) -> GpuBlocks | None:
    """The functions of a block codec; None, with one warning, where Triton or what it compiles with is missing."""
    return GpuBlocks(constants) if _has_triton() else None


def gpu_rows() -> GpuRows | None:
    """The functions for rows of logits; None where `gpu_blocks` gives None."""
    return GpuRows() if _has_triton() else None


@functools.cache
def _has_triton() -> bool:
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
