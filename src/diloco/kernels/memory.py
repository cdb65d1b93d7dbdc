"""New vectors in huge pages, copies to a device, and how much of a vector is worked on at once."""

import numpy as np
import torch
from torch import Tensor


def empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new vector; on a CPU in huge pages where Linux has them: NumPy asks for them, torch does not.

    Otherwise the first write costs a page fault every 4 kB, which takes longer than the write, and a read costs an
    address translation.
    """
    if device.type != "cpu" or not num_elements:  # NumPy gives an empty vector a stride that torch can't view
        return torch.empty(num_elements, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(num_elements, str(dtype).removeprefix("torch.")))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without a wait for what a GPU has to do before."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def elements_at_once(device: torch.device) -> int:
    """Elements in a piece of a long vector, so that temporaries stay small beside a fragment.

    On a GPU a piece is larger: an operation on it must take much longer than its launch.
    """
    return 1 << 22 if device.type == "cpu" else 1 << 26
