"""Sums over rows of logits, and their gradients, for a GPU, in Triton: each reads the logits once, in their dtype.

A program works on one row, CHUNK logits at a time, in FP32.
"""

# pyrefly: ignore-errors[implicit-any-parameter, unsupported-operation]
# ruff: noqa: ANN001
import triton
import triton.language as tl

_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def log_sums(logits_ptr, target_ptr, log_z_ptr, target_logit_ptr, stride, num_logits, CHUNK: tl.constexpr) -> None:
    """Write each row's log Σ exp and the logit of its target; NaN for a target that is no column."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    column = tl.arange(0, CHUNK)
    largest, total = tl.full([], _LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, num_logits, CHUNK):
        is_here = first + column < num_logits
        x = tl.load(logits_ptr + first + column, mask=is_here, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    tl.store(log_z_ptr + row, largest + tl.log(total))
    target = tl.load(target_ptr + row)
    is_column = (target >= 0) & (target < num_logits)
    target_logit = tl.load(logits_ptr + target, mask=is_column, other=float("nan"))
    tl.store(target_logit_ptr + row, target_logit.to(tl.float32))


@triton.jit
def gradients(
    logits_ptr,
    target_ptr,
    log_z_ptr,
    of_log_z_ptr,
    of_target_ptr,
    gradient_ptr,
    stride,
    num_logits,
    CHUNK: tl.constexpr,
) -> None:
    """Write softmax(row) · ∂/∂log Z, and add ∂/∂target, one number for all rows, in the target's column.

    A row whose target is no column is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    gradient_ptr += row * num_logits
    log_z, of_log_z, of_target = tl.load(log_z_ptr + row), tl.load(of_log_z_ptr + row), tl.load(of_target_ptr)
    target = tl.load(target_ptr + row)
    of_log_z = tl.where((target >= 0) & (target < num_logits), of_log_z, float("nan"))
    for first in range(0, num_logits, CHUNK):
        column = first + tl.arange(0, CHUNK)
        is_here = column < num_logits
        x = tl.load(logits_ptr + column, mask=is_here, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_z) * of_log_z
        gradient = tl.where(column == target, gradient + of_target, gradient)
        tl.store(gradient_ptr + column, gradient.to(gradient_ptr.dtype.element_ty), mask=is_here)
