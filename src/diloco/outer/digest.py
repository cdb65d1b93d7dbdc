"""The digest that proves the outer parameters equal on all replicas."""

import hashlib
from collections.abc import Callable, Mapping

from torch import Tensor


def parameters_hash(parameters: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = Tensor.detach) -> str:
    """SHA-256 over the FP32 bits of parameters, in the order of their names.

    Args:
        parameters: by name; floats of any dtype and device.
        gather: makes the whole of a parameter that is sharded.
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(gather(parameters[name]).detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()
