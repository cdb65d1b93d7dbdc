"""A replica of several processes: its parameters are DTensors, of which each process holds a shard.

The engine works on local shards, and shard i of a replica exchanges with shard i of the others. A replica of one
process has plain tensors, for which every function here is the identity.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes a second to import, and most replicas are one process


def local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory and without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All shards together; every process of the replica must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(part: Tensor, parameter: Tensor) -> Tensor:
    """A shard of any memory, as a tensor that is sharded as the parameter is."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of this process's shard on the CPU, sharded as the tensor is."""
    copy = local(tensor).to("cpu", copy=True)
    # `from_local` would take it back to the mesh's device.
    return type(tensor)(copy, tensor._spec, requires_grad=False) if is_sharded(tensor) else copy


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def shard_group(parameters: Mapping[str, nn.Parameter]) -> dist.ProcessGroup | None:
    """The processes that hold a replica's shards; None if it is one process.

    Raises:
        ValueError: if the parameters are not all sharded over the same processes, along one dimension.
    """
    meshes = {
        name: parameter.device_mesh if is_sharded(parameter) else None for name, parameter in parameters.items()
    }
    first_name, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other != mesh:
            raise ValueError(
                f"parameter {name} is on {other or 'one process'}, and {first_name} on {mesh or 'one process'}: "
                "shard the whole model over one mesh, fully_shard(model, mesh=mesh['shard'])"
            )
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise ValueError(
            f"parameter {first_name} is on {mesh}, of {mesh.ndim} dimensions: shard a replica along one and leave "
            "the replicas to the engine, fully_shard(model, mesh=mesh['shard'])"
        )
    return mesh.get_group()


def sum_over_shards(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of every shard's values; every process of the replica must call it."""
    if group is not None:
        values = values.clone()
        dist.all_reduce(values, group=group)
    return values


def joined(tensors: Iterable[Tensor], out_N: Tensor | None = None) -> Tensor:
    """The local shards of tensors, one after the other, as one FP32 vector."""
    return torch.cat([local(tensor).reshape(-1).float() for tensor in tensors], out=out_N)
