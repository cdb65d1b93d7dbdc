"""The names of torch that are not public, on the torch that runs the tests; torch 2.9 to 2.13 have them."""

import io
from copy import deepcopy
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.ports import free_port
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from diloco.exchange.private_torch import changes_of, dtensor_like, gloo_backend, is_cut_again, timeout_seconds_of


def test_gloo_takes_an_address_and_a_timeout():
    """ProcessGroupGloo._Options, with _timeout and _devices."""
    backend = gloo_backend(dist.HashStore(), 0, 1, "127.0.0.1", 7.0)
    assert (backend.rank(), backend.size()) == (0, 1)
    assert backend.options._timeout == timedelta(seconds=7)


def test_a_group_tells_its_timeout():
    """ProcessGroup._get_backend and _device_types, and the options of a backend with _timeout."""
    place = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1, timeout=timedelta(seconds=11))
    assert timeout_seconds_of(dist.group.WORLD) == 11
    dist.destroy_process_group()


def test_the_changes_of_a_parameter_are_counted():
    """Tensor._version."""
    parameter = torch.nn.Parameter(torch.ones(2))
    before = changes_of(parameter)
    with torch.no_grad():
        parameter.add_(1.0).mul_(2.0)
    assert changes_of(parameter) == before + 2


def test_a_shard_of_what_was_cut_before_says_so():
    """_StridedShard, with its split_factor; what FSDP2 does with it is held by tests/engine/test_mesh.py."""
    assert is_cut_again(_StridedShard(0, split_factor=2))
    assert not is_cut_again(_StridedShard(0, split_factor=1)) and not is_cut_again(Shard(0))


def test_a_shard_in_other_memory_and_of_another_dtype_is_a_dtensor():
    """DTensor._spec with a tensor_meta, its _local_tensor, and its constructor; the device of the mesh is free."""
    place = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    like = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    part = torch.ones(3, 2, dtype=torch.bfloat16, device="meta")
    made = dtensor_like(part, like)
    assert made.to_local().device.type == "meta" and made.dtype == torch.bfloat16 and made.shape == like.shape
    assert made.placements == like.placements
    half = torch.ones(3, 2, dtype=torch.bfloat16)
    assert dtensor_like(half, like).to_local().data_ptr() == half.data_ptr()
    file, later = io.BytesIO(), torch.arange(9.0)[3:].view(3, 2)  # at an offset in its storage
    torch.save(deepcopy(dtensor_like(later, like)), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).to_local().equal(later)
    dist.destroy_process_group()
