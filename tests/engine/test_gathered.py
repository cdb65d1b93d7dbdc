"""Whole fragments in the first process of a sharded replica, and back into shards that are uneven or empty."""

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import diloco
from diloco.engine.elastic_shards import GatheredParameters
from diloco.engine.parameters import FragmentParameters, gathered

S = 3


class Model(nn.Module):
    """Parameters of 1, 2, 5 and 7 rows over 3 shards, one of them in BF16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(columns, rows) for columns, rows in ((4, 5), (3, 7), (6, 1)))
        self.head = nn.Linear(9, 2, bias=False).to(torch.bfloat16)


def columns(parameter: nn.Parameter) -> Shard:
    """Matrices whose columns 3 divides are cut along them."""
    return Shard(1 if parameter.ndim == 2 and parameter.shape[1] % S == 0 else 0)


def cut_of(model: nn.Module) -> FragmentParameters:
    return FragmentParameters(model, diloco.strided(model, layers_per_fragment=1))


def gather_and_scatter(has_masters: bool) -> None:
    whole, expected = cut_of(Model()), [cut_of(Model()).flat(p) for p in range(4)]
    model = Model()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (S,)), shard_placement_fn=columns)
    masters = {n: p.detach().float() for n, p in model.named_parameters()} if has_masters else None
    parts = GatheredParameters(model, diloco.strided(model, layers_per_fragment=1), masters, timeout_seconds=20)
    is_first = dist.get_rank() == 0
    flat = [parts.flat(p) for p in range(4)]
    assert [flat_N.numel() for flat_N in flat] == [(e.numel() if is_first else 0) for e in expected]
    if is_first:
        assert all(map(torch.equal, flat, expected))
        assert parts.facts(flat) == whole.facts(expected)
        assert parts.spans == whole.spans
    halves = [parts.outer_gradient(p, flat_N / 2, torch.empty_like(flat_N)) for p, flat_N in enumerate(flat)]
    assert all(torch.equal(half_N, flat_N / -2) for half_N, flat_N in zip(halves, flat, strict=True))
    named = parts.all_named(flat_N * 3 for flat_N in flat)
    for name, parameter in Model().named_parameters():
        assert torch.equal(gathered(named[name]), parameter.float() * 3)
    assert all(map(torch.equal, [parts.flat_of(p, named) for p in range(4)], [flat_N * 3 for flat_N in flat]))
    for p in range(4):
        with parts.merging(p, 1) as theta:
            for own in theta:
                own.mul_(1.3)
    once = Model()
    with torch.no_grad():
        for parameter in once.parameters():
            parameter.copy_(parameter.float() * 1.3)  # rounded to its own dtype, once
    for name, parameter in once.named_parameters():
        assert torch.equal(gathered(model.get_parameter(name).detach()), parameter)
        if masters is not None:
            assert torch.equal(gathered(masters[name]), Model().get_parameter(name).float() * 1.3)


@pytest.mark.parametrize("has_masters", [False, True])
def test_shards_become_whole_fragments_and_whole_fragments_shards(has_masters: bool):
    run_replicas(gather_and_scatter, S, has_masters)
