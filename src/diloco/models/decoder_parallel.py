"""Tensor parallelism of the decoder: each of t processes has H/t heads, 4D/t hidden units, and V/t tokens.

The linear layer of queries, keys and values is cut by rows, not by heads: its outputs are gathered, and each
process takes those of its heads. The embedding is cut by tokens, and so are the logits, which are gathered.

Shapes: B sequences, T tokens, D width, H heads, K = D/H elements per head, V vocabulary.
"""

import math
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a `Decoder` over the processes of a mesh of one dimension, which call it with the same tokens."""
    decoder = cast(Any, model)
    _cut_by_tokens(decoder.embedding, mesh)
    for block in decoder.blocks:
        _in_each(block.attention_norm, mesh, Replicate())
        _in_each(block.mlp_norm, mesh, Replicate())
        _in_each(block.attention.query_norm, mesh, Shard(1))
        _in_each(block.attention.key_norm, mesh, Shard(1))
        plan: dict[str, ParallelStyle] = {
            "attention.qkv": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
            "attention.out": RowwiseParallel(),
            "mlp_in": ColwiseParallel(),
            "mlp_out": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        _take_own_heads(block.attention, mesh)
    # Its output stays a DTensor, as the embedding is, by which it is multiplied.
    distribute_module(decoder.norm, mesh, input_fn=_placed(Replicate()))
    # A copy, since FSDP2 warns of a view.
    decoder.register_forward_hook(lambda _, __, logits_BxTxV: logits_BxTxV.full_tensor().clone())


def _cut_by_tokens(embedding: Any, mesh: DeviceMesh) -> None:
    """Let each process look its own tokens up, of which there are V/t, and add what all have found.

    `RowwiseParallel` keeps a batch's mask in a placement, which torch.compile can't trace.
    """
    first = math.ceil(embedding.num_embeddings / mesh.size()) * mesh.get_local_rank()

    def look_up(tokens_BxT: Tensor) -> Tensor:
        own_VxD, index_BxT = embedding.weight.to_local(), tokens_BxT - first
        is_own_BxT = (index_BxT >= 0) & (index_BxT < len(own_VxD))
        x_BxTxD = F.embedding(index_BxT.where(is_own_BxT, 0), own_VxD).where(is_own_BxT[..., None], 0)
        return DTensor.from_local(x_BxTxD, mesh, [Partial()], run_check=False).full_tensor()

    embedding.weight = nn.Parameter(distribute_tensor(embedding.weight, mesh, [Shard(0)]))
    embedding.forward = look_up


def _in_each(norm: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Keep the gains of a norm in each process, with the sum of all gradients, where the inputs are placed so."""
    distribute_module(norm, mesh, input_fn=_placed(placement), output_fn=lambda _, output, __: output.to_local())


def _placed(placement: Placement) -> Any:
    """A function that makes a module's input, the local tensor of a placement, a DTensor."""
    return lambda _, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [placement], run_check=False),)


def _take_own_heads(attention: Any, mesh: DeviceMesh) -> None:
    """Let an attention see the queries, keys and values of this process's heads alone."""
    num_heads = attention.num_heads
    own = num_heads // mesh.size()
    first = own * mesh.get_local_rank()

    def take(_: nn.Module, __: object, output: DTensor) -> Tensor:
        # Each process has the gradient of its heads, and zeros for the others.
        qkv = output.to_local(grad_placements=[Partial()]).unflatten(-1, (3, num_heads, -1))
        return qkv[..., first : first + own, :].flatten(-3)

    attention.qkv.register_forward_hook(take)
    attention.num_heads = own
