"""Calls of torch by names that are not public, where torch has no public ones.

Tests say which versions of torch have them: tests/exchange/test_private_torch.py.
"""

from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement  # takes a second to import


def gloo_backend(store: dist.Store, rank: int, size: int, address: str, timeout_seconds: float) -> object:
    """A backend of gloo of which torch.distributed knows nothing, on the network interface of an address.

    A public constructor of `ProcessGroupGloo` chooses the interface by the host's name.
    """
    options = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)  # whose stub has neither send nor recv


def timeout_seconds_of(group: dist.ProcessGroup) -> float:
    """The timeout with which a group was made."""
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()


def changes_of(tensor: Tensor) -> int:
    """The number of operations that have changed a tensor in place."""
    return tensor._version


def is_cut_again(placement: "Placement") -> bool:
    """True if a dimension of the mesh cuts what a later one has cut, as FSDP2 does after tensor parallelism."""
    from torch.distributed.tensor.placement_types import _StridedShard  # takes a second to import

    return isinstance(placement, _StridedShard) and placement.split_factor > 1


def dtensor_like(part: Tensor, like: "DTensor") -> "DTensor":
    """A DTensor that is sharded as `like` is, from this process's shard in any memory and of any dtype.

    `DTensor.from_local` takes a shard in host memory to the mesh's device.
    """
    spec = copy(like._spec)
    assert spec.tensor_meta is not None, "the tensor exists"
    spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    # torch takes a wrapper with an offset in its storage for one that has memory, and can't copy or pickle it.
    whole = type(like)(part.new_empty(()).expand(part.shape), spec, requires_grad=False)
    whole._local_tensor = part
    return whole
