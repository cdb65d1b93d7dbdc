"""The formats without a scale for a GPU, in Triton: cast and check for finite values in one pass over memory.

A program works on SIZE elements. MANTISSA names the format: 23 bits FP32, 7 BF16, 10 FP16.
"""

# pyrefly: ignore-errors[implicit-any-parameter, unsupported-operation]
# ruff: noqa: ANN001
import triton
import triton.language as tl


@triton.jit
def pack(delta_ptr, body_ptr, bad_ptr, num_elements, MANTISSA: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Write the elements in the format; write 1 to `bad` if one is not finite."""
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_here = element < num_elements
    bits = tl.load(delta_ptr + element, mask=is_here, other=0)
    magnitude = bits & 0x7FFFFFFF
    _check_finite(magnitude, bad_ptr, SIZE)
    if MANTISSA == 23:
        code = bits
    elif MANTISSA == 7:
        # To nearest, ties to even; the largest finite value is the largest of FP32 without its lower half.
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        code = ((bits >> 16) & 0x8000 | tl.minimum(rounded, 0x7F7F)).to(tl.int16)
    else:
        limited = tl.minimum(magnitude, 0x477FE000)  # 65504
        half = (limited.to(tl.float32, bitcast=True)).to(tl.float16).to(tl.int16, bitcast=True)
        code = half | ((bits >> 16) & 0x8000).to(tl.int16)
    tl.store(body_ptr + element, code, mask=is_here)


@triton.jit
def unpack(
    body_ptr, to_ptr, bad_ptr, num_elements, MANTISSA: tl.constexpr, ADD: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Write the values, or add them; write 1 to `bad` if one is not finite."""
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_here = element < num_elements
    code = tl.load(body_ptr + element, mask=is_here, other=0)
    if MANTISSA == 23:
        value = code.to(tl.float32, bitcast=True)
    elif MANTISSA == 7:
        value = (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = code.to(tl.float16, bitcast=True).to(tl.float32)
    _check_finite(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, bad_ptr, SIZE)
    if ADD:
        value = tl.load(to_ptr + element, mask=is_here, other=0.0) + value
    tl.store(to_ptr + element, value, mask=is_here)


@triton.jit
def _check_finite(magnitude, bad_ptr, SIZE: tl.constexpr) -> None:
    """Write 1 to `bad` if a magnitude is not that of a finite number; a thread looks at four that it holds."""
    largest = tl.max(tl.reshape(magnitude, [SIZE // 4, 4]), axis=1)
    tl.store(bad_ptr + tl.zeros_like(largest), 1, mask=largest >= 0x7F800000)
