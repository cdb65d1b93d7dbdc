"""Replicas on meshes of several dimensions, with HSDP and tensor parallelism, against replicas of one process."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import diloco
from diloco.engine.elastic_shards import GatheredParameters
from diloco.engine.parameters import FragmentParameters, gathered, local, own_place
from diloco.errors import ExchangeError, UserError


class Block(nn.Module):
    """Rows and columns that 2 does not divide, and a norm, which tensor parallelism leaves whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)


class Model(nn.Module):
    """Two blocks, one of them with a norm of one element, and a head in BF16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(5), Block(1)])
        self.head = nn.Linear(6, 3, bias=False).to(torch.bfloat16)


def hsdp(model: Model, mesh: DeviceMesh) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


def tensor(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        distribute_module(block.norm, mesh)
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model.head, mesh, ColwiseParallel())


def fsdp_and_tensor(model: Model, mesh: DeviceMesh) -> None:
    warnings.filterwarnings("ignore", "You are attempting to slice a submesh")  # torch 2.9 warns of any
    tensor(model, mesh["tensor"])
    hsdp(model, mesh[tuple(name for name in (mesh.mesh_dim_names or ()) if name != "tensor")])


MESHES: dict[str, tuple[Callable[[Model, DeviceMesh], None], dict[str, int]]] = {
    "hsdp": (hsdp, {"replicate": 2, "shard": 2}),
    "tensor": (tensor, {"tensor": 4}),
    "fsdp and tensor": (fsdp_and_tensor, {"shard": 2, "tensor": 2}),
    "hsdp and tensor": (fsdp_and_tensor, {"replicate": 2, "shard": 2, "tensor": 2}),
    "copies of tensor": (fsdp_and_tensor, {"replicate": 2, "shard": 1, "tensor": 2}),
    "one process": (lambda model, mesh: None, {}),
}


def fragments_of(model: Model) -> tuple[diloco.Fragment, ...]:
    return diloco.strided(model, layers_per_fragment=1)


def on_mesh(kind: str, num_replicas: int = 1) -> tuple[Model, DeviceMesh]:
    """A model on the mesh of its replica, and the mesh of all processes."""
    shard, sizes = MESHES[kind]
    mesh = init_device_mesh("cpu", (num_replicas, *sizes.values()), mesh_dim_names=("replica", *sizes))
    model = Model()
    if sizes:
        shard(model, mesh[tuple(sizes)])
    return model, mesh


def go_through_parts() -> None:
    for kind, has_masters in (("hsdp", False), ("tensor", True), ("fsdp and tensor", False)):
        check_parts(kind, has_masters)


def check_parts(kind: str, has_masters: bool) -> None:
    """Parts make up the parameters, and become shards again, in every process and in the first alone."""
    model, _ = on_mesh(kind)
    whole = FragmentParameters(Model(), fragments_of(Model()))
    expected = [whole.flat(p) for p in range(3)]
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters()} if has_masters else None
    own = FragmentParameters(model, fragments_of(model), masters)
    first = GatheredParameters(model, fragments_of(model), masters, timeout_seconds=60)
    flat, sizes = [own.flat(p) for p in range(3)], [expected_N.numel() for expected_N in expected]
    counted = own.group.reduce(torch.tensor([flat_N.numel() for flat_N in flat]))
    assert counted.tolist() == sizes, "each element is in the part of one process"
    gathered_flat = [first.flat(p) for p in range(3)]
    if dist.get_rank() == 0:
        assert all(map(torch.equal, gathered_flat, expected))
        assert first.spans == whole.spans and first.facts(gathered_flat) == whole.facts(expected)
    initial = {name: parameter.detach() for name, parameter in Model().named_parameters()}
    for parameters, vectors in ((own, flat), (first, gathered_flat)):
        named = parameters.all_named(vector_N * 3 for vector_N in vectors)
        for name, tensor in named.items():
            assert torch.equal(gathered(tensor), initial[name].float() * 3)
        again = [parameters.flat_of(p, named) for p in range(3)]
        assert all(map(torch.equal, again, [vector_N * 3 for vector_N in vectors]))
    for number, parameters in enumerate((own, first), 1):
        for p in range(3):
            with parameters.merging(p, 1) as theta:
                for part in theta:
                    part.mul_(2.0)
        for name, parameter in model.named_parameters():
            expected_now = initial[name] * 2.0**number
            assert torch.equal(gathered(parameter.detach()), expected_now)
            # Of the processes with the same shard torch gathers that of one.
            assert torch.equal(local(parameter), expected_now[own_place(parameter, part=False)])


@pytest.mark.slow
def test_each_element_is_in_the_part_of_one_process():
    run_replicas(go_through_parts, 4)


def train(kind: str) -> tuple[str, str, int]:
    """The hashes of Θ and of θ, and the bytes that the replica has sent."""
    model, mesh = on_mesh(kind, num_replicas=2)
    exchange = diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=60)
    engine = diloco.StreamingDiLoCo(
        model, fragments=fragments_of(model), sync_every=4, overlap_steps=1, exchange=exchange, wire="fp32"
    )
    whole = {name: parameter.detach() for name, parameter in Model().named_parameters()}
    for step in range(1, 15):
        generator = torch.Generator().manual_seed(100 * exchange.replica + step)
        for name, parameter in model.named_parameters():
            # The same step of each element, however the parameters are cut.
            move = torch.randn(whole[name].shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            local(parameter).add_(move[own_place(parameter, part=False)], alpha=0.1)
        engine.step()
    engine.finish()
    theta = diloco.outer.digest.parameters_hash(dict(model.named_parameters()), gathered)
    return engine.outer_hash(), theta, engine.bytes_sent


def train_on(kinds: list[str]) -> list[tuple[str, str, int]]:
    """The results on each mesh; eight processes check the parts of a mesh of them all first."""
    if dist.get_world_size() == 8:
        check_parts("hsdp and tensor", has_masters=False)
    return [train(kind) for kind in kinds]


@pytest.mark.slow
def test_replicas_of_two_by_two_processes_take_the_outer_steps_of_one():
    """The same Θ and θ, bit for bit, as with replicas of one process, and hardly more bytes."""
    (one,), (other,) = run_replicas(train_on, 2, ["one process"])
    assert one[0] == other[0] and one[1] != other[1]
    for processes in zip(*run_replicas(train_on, 8, ["hsdp", "fsdp and tensor"]), strict=True):
        assert {outer_hash for outer_hash, *_ in processes} == {one[0]}
        assert [theta for _, theta, _ in processes] == [one[1]] * 4 + [other[1]] * 4
        # 13 payloads of each process, with a header of at most 48 bytes, and each element once.
        for _, _, num_bytes in processes:
            assert 0 < num_bytes - one[2] <= 13 * 48 * 3


def meet_other_copies() -> list[str]:
    """The refusals of a replica whose second process has other values of what both hold."""
    return [meet_one(when) for when in ("before", "in training", "in a store")]


def meet_one(when: str) -> str:
    model = Model()
    model.scale = nn.Parameter(torch.ones(()), requires_grad=False)  # in no fragment, so that it need not be cut
    distribute_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("copy",)))
    model.scale.requires_grad_(False)  # which torch 2.9 forgets
    norm, fragments = local(model.blocks[0].norm.weight), fragments_of(model)
    if when != "in training":
        norm.add_(dist.get_rank())
    try:
        if when == "in a store":
            GatheredParameters(model, fragments, timeout_seconds=60).flat(0)
        exchange = diloco.LoopbackExchange()
        engine = diloco.StreamingDiLoCo(
            model, fragments=fragments, sync_every=3, exchange=exchange, overlap_steps=0
        )
        for _ in range(3):
            norm.add_(dist.get_rank())
            engine.step()
    except UserError as error:
        return str(error)
    return "no refusal"


def test_processes_whose_copies_of_a_parameter_differ_are_refused():
    """As after another seed in each process, and after gradients that are not summed."""
    for refusals in run_replicas(meet_other_copies, 2):
        for refusal in refusals:
            assert "the same shard of parameter blocks.0.norm.weight, along dimension copy of its" in refusal


def meet_one_other_copy() -> str:
    """The refusal of a replica of which one process alone has another value, along one dimension of its mesh."""
    model, _ = on_mesh("copies of tensor")
    local(model.blocks[0].up.weight).add_(float(dist.get_rank() == 0))
    try:
        diloco.StreamingDiLoCo(model, fragments=fragments_of(model), exchange=diloco.LoopbackExchange())
    except (UserError, ExchangeError) as error:
        return str(error)
    return "no refusal"


@pytest.mark.slow
def test_no_process_waits_for_one_that_has_seen_another_copy():
    """The copies are processes 0 and 2; 1 and 3 have seen nothing, and share other parameters with them."""
    refusals = run_replicas(meet_one_other_copy, 4, timeout_seconds=30)
    for refusal in refusals[::2]:
        assert "the same shard of parameter blocks.0.up.weight, along dimension replicate of its" in refusal
    for refusal in refusals[1::2]:
        assert "another shard of replica 0 failed" in refusal


def load_from_another_mesh() -> str:
    """The refusal of a state whose shards have the right shapes, and lie in other places."""
    states = []
    for sizes in ((4, 1), (2, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
        model = nn.Sequential(nn.Linear(4, 8, bias=False))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        engine = diloco.StreamingDiLoCo(model, fragments="whole", exchange=diloco.LoopbackExchange())
        if states:
            try:
                engine.load_state_dict(states.pop())
            except (UserError, ExchangeError) as error:
                return str(error)
        states.append(engine.state_dict())
    return "no refusal"


@pytest.mark.slow
def test_a_state_whose_shards_lie_elsewhere_is_refused():
    """The second and the third quarter change places between the two middle processes."""
    first, *middle, last = run_replicas(load_from_another_mesh, 4)
    for refusal in middle:
        assert "outer of 0.weight is not sharded as the model is" in refusal
    for refusal in (first, last):
        assert "another shard of replica 0 failed" in refusal
