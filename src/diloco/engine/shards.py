"""A replica of several processes: its parameters are DTensors, of which each process holds a shard.

The engine works on local shards, and shard i of a replica exchanges with shard i of the others. For a replica of
one process these functions return its plain tensors, and talk to nobody.
"""

import sys
from collections.abc import Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from diloco.errors import UserError
from diloco.exchange.group import OneProcess, TorchGroup
from diloco.exchange.transport import Group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes a second to import, and most replicas are one process


def local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory and without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, from all shards; every process of the replica must call it."""
    if not is_sharded(tensor):
        return tensor
    on_device = local(tensor).to(tensor.device_mesh.device_type)
    return sharded_like(on_device, tensor).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """A tensor that is sharded as `like` is, from this process's shard in any memory and of any dtype."""
    if not is_sharded(like):
        return part
    # Not by DTensor.from_local, which takes the part to the mesh's device.
    spec = copy(like._spec)
    assert spec.tensor_meta is not None, "the tensor exists"
    spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return type(like)(part, spec, requires_grad=False)


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of this process's shard on the CPU, sharded as the tensor is."""
    return sharded_like(local(tensor).to("cpu", copy=True), tensor)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True for a DTensor."""
    return hasattr(tensor, "to_local")


def replica_group(parameters: Mapping[str, nn.Parameter]) -> Group:
    """The processes that hold a replica's shards.

    Raises:
        UserError: if the parameters are not all cut into shards over the same processes, along one dimension.
    """
    meshes = {
        name: parameter.device_mesh if is_sharded(parameter) else None for name, parameter in parameters.items()
    }
    first_name, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other != mesh:
            raise UserError(
                f"parameter {name} is on {other or 'one process'}, and {first_name} on {mesh or 'one process'}: "
                "shard the whole model over one mesh, fully_shard(model, mesh=mesh['shard'])"
            )
    if mesh is None:
        return OneProcess()
    if mesh.ndim != 1:
        raise UserError(
            f"parameter {first_name} is on {mesh}, of {mesh.ndim} dimensions: shard a replica along one and leave "
            "the replicas to the engine, fully_shard(model, mesh=mesh['shard'])"
        )
    for name, parameter in parameters.items():
        if is_sharded(parameter) and not all(placement.is_shard() for placement in parameter.placements):
            raise UserError(
                f"parameter {name} is {parameter.placements} on {mesh}, which is not cut into shards: "
                "use fully_shard(model, mesh=mesh['shard'])"
            )
    return TorchGroup(mesh.get_group(), local(next(iter(parameters.values()))).device)


def reshard(model: nn.Module) -> None:
    """Give FSDP2's parameters, which it keeps gathered after a pass without a backward, back to their shards.

    By default it keeps those of the outermost module. They hide the shards, and do not see a change of them.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return  # nothing is sharded
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def joined(tensors: Iterable[Tensor], out_N: Tensor | None = None) -> Tensor:
    """The local shards of tensors, one after the other, as one FP32 vector."""
    return torch.cat([local(tensor).reshape(-1).float() for tensor in tensors], out=out_N)
