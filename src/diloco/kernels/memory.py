"""New vectors in huge pages."""

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
