"""The names of torch that are not public, on the torch that runs the tests; torch 2.9 to 2.13 have them."""

from datetime import timedelta

import torch.distributed as dist
from tests.ports import free_port

from diloco.exchange.private_torch import gloo_backend, timeout_seconds_of


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
