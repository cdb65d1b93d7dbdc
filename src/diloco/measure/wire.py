"""Bits, error and speed of the codecs.

Shapes: N elements.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.measure.timing import shortest_seconds, torch_threads
from diloco.wire import CODECS, Codec, codec
from diloco.wire.kernels.memory import empty


@dataclass(frozen=True, kw_only=True)
class WireSpeed:
    """Speeds in GB/s of FP32 input: 4 bytes an element with every codec."""

    num_threads: int
    """CPU threads of torch; on a GPU they do not matter."""
    copy_gbyte_s: float
    """Speed of copying the vector, measured just before."""
    encode_gbyte_s: float
    """Speed from the vector to a payload."""
    decode_add_gbyte_s: float
    """Speed from a payload to its sum with a vector."""


@dataclass(frozen=True, kw_only=True)
class WireMeasurement:
    """Bits, error and speed of one codec."""

    wire: str
    """The codec's name with every option."""
    bits_per_value: float
    """Bits of a payload for each value, header and scales included."""
    relative_error: float
    """‖decode(encode(Δ)) − Δ‖ / ‖Δ‖ on a real outer gradient."""
    speeds: tuple[WireSpeed, ...]
    """Speeds with one thread, and with all."""


def measure_wire(
    specs: Sequence[str] = tuple(CODECS), *, gradient_N: Tensor, num_values: int, device: str = "cpu"
) -> Iterator[WireMeasurement]:
    """Measure codecs, one after the other.

    Args:
        specs: names of codecs, with options.
        gradient_N: a real outer gradient, flat FP32: error is measured on it, speed on repetitions of it.
        num_values: length of the vector that speed is measured on.
        device: where the vector is: `cpu` or `cuda`.

    Raises:
        UserError: if a codec does not exist, there is nothing to measure, or the gradient can't be encoded.
    """
    codecs = [codec(spec) for spec in specs]
    if num_values < 1:
        raise UserError(f"num_values must be at least 1, not {num_values}", "num_values")
    if not gradient_N.any():
        raise UserError("the gradient holds nothing but zeros, so that a relative error can't be measured")
    gradient_N = gradient_N.to(device, torch.float32)
    repeats = -(-num_values // gradient_N.numel())
    delta_N = empty(num_values, torch.float32, gradient_N.device).copy_(gradient_N.repeat(repeats)[:num_values])
    for wire in codecs:
        decoded_N = wire.decode(wire.encode(gradient_N), gradient_N.numel())
        yield WireMeasurement(
            wire=wire.spec,
            bits_per_value=8 * wire.payload_bytes(num_values) / num_values,
            relative_error=((decoded_N - gradient_N).norm() / gradient_N.norm()).item(),
            speeds=tuple(_speed(wire, delta_N, n) for n in sorted({1, torch.get_num_threads()})),
        )


def _speed(wire: Codec, delta_N: Tensor, num_threads: int) -> WireSpeed:
    payload = wire.encode(delta_N)
    total_N = empty(delta_N.numel(), torch.float32, delta_N.device).zero_()

    def gbyte_s(work: Callable[[], object]) -> float:
        return 4e-9 * delta_N.numel() / shortest_seconds(work, delta_N.device)

    with torch_threads(num_threads):
        return WireSpeed(
            num_threads=num_threads,
            copy_gbyte_s=gbyte_s(lambda: _copy(total_N, delta_N, num_threads)),
            encode_gbyte_s=gbyte_s(lambda: wire.encode(delta_N)),
            decode_add_gbyte_s=gbyte_s(lambda: wire.decode_into(total_N, payload, add=True)),
        )


def _copy(to_N: Tensor, from_N: Tensor, num_threads: int) -> None:
    """The fastest copy: with one thread NumPy copies faster than torch."""
    if num_threads == 1 and to_N.device.type == "cpu":
        np.copyto(to_N.numpy(), from_N.numpy())
    else:
        to_N.copy_(from_N)
