"""The digest that proves replicas equal."""

import hashlib
from collections.abc import Callable, Mapping

from torch import Tensor


def parameters_hash(parameters: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = Tensor.detach) -> str:
    """SHA-256 of the parameters' FP32 bits, in the order of their names; of what `gather` makes of each."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(gather(parameters[name]).detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()
