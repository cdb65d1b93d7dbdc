"""New vectors, in huge pages or in used memory, copies to and from a device, and pieces of long vectors."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_RETURNED_BYTES = 32 << 20
"""Size from which on glibc returns freed memory to the system, which writes zeros before it gives it again."""


_spare: list[np.ndarray] = []


def empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new vector; on a CPU in huge pages where Linux has them: NumPy asks for them, torch does not.

    Otherwise the first write costs a page fault every 4 kB, which takes longer than the write, and a read costs an
    address translation.
    """
    if device.type != "cpu" or not num_elements:  # NumPy gives an empty vector a stride that torch can't view
        return torch.empty(num_elements, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(num_elements, str(dtype).removeprefix("torch.")))


def empty_like(vector_N: Tensor) -> Tensor:
    """A new vector of the same length, type and device, as `empty` makes it."""
    return empty(vector_N.numel(), vector_N.dtype, vector_N.device)


def recycled_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """A new uint8 vector; if it is long, in the memory of the last one of its length that nobody uses any more.

    One vector's memory is kept, for what is made again and again.
    """
    if device.type != "cpu" or num_bytes < _RETURNED_BYTES:
        return empty(num_bytes, torch.uint8, device)
    try:
        memory = _spare.pop()  # by one thread alone
    except IndexError:
        memory = np.empty(0, np.uint8)
    if memory.size != num_bytes:
        memory = np.empty(num_bytes, np.uint8)
    vector = np.frombuffer(memory, np.uint8)
    weakref.finalize(vector, _keep, memory).atexit = False
    return torch.from_numpy(vector)


def _keep(memory: np.ndarray) -> None:
    _spare[:] = [memory]


def has_streams(device: torch.device) -> bool:
    """True for a device whose work can be queued on several streams: not for a CPU, nor for Apple's GPUs."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def widest(device: torch.device) -> torch.dtype:
    """FP64 on a CPU and on GPUs of CUDA, FP32 on others, which may have no FP64: Apple's have none."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without a wait for what a GPU has to do before."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=has_streams(device))


def begin_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; the function that is returned waits for this copy, and returns it.

    A copy that is begun when it is read, as `Tensor.tolist` begins one, waits for all that was queued before then.
    """
    if tensor.device.type == "cpu":
        return lambda: tensor
    if not has_streams(tensor.device):
        return tensor.cpu
    module = torch.get_device_module(tensor.device)
    copy, wait = pinned_copy(tensor), mark(tensor.device, module.current_stream(tensor.device))

    def read() -> Tensor:
        wait()
        return copy

    return read


def mark(device: torch.device, stream: Any) -> Callable[[], None]:
    """A function by which the host waits for what a stream was given so far."""
    # On CUDA alone an event has a choice: a thread that waits for this one leaves its core to others.
    event = torch.get_device_module(device).Event(**({"blocking": True} if device.type == "cuda" else {}))
    event.record(stream)
    return event.synchronize


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which torch keeps for the next copies; the host may read it after a wait."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor, non_blocking=True)


def elements_at_once(device: torch.device) -> int:
    """Elements in a piece of a long vector, so that temporaries stay small beside a fragment.

    On a GPU a piece is larger: an operation on it must take much longer than its launch.
    """
    return 1 << 17 if device.type == "cpu" else 1 << 26
