"""Joining the other replicas: the process group, this replica's device, its threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from diloco.exchange import Exchange
from diloco.exchange.loopback import LoopbackExchange
from diloco.exchange.process_group import ProcessGroupExchange
from diloco.training.config import TrainConfig


@dataclass(frozen=True)
class World:
    """Where this replica stands among the others."""

    exchange: Exchange
    """The way to the other replicas."""
    device: torch.device
    """What this replica computes on."""
    is_first_on_machine: bool
    """Whether this process writes what the processes of one machine share."""
    autocast: bool
    """Whether the forward pass runs in bfloat16."""

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        return self.exchange.replica

    @property
    def num_replicas(self) -> int:
        """M."""
        return self.exchange.num_replicas


@contextmanager
def join(config: TrainConfig) -> Iterator[World]:
    """The world that torchrun or our own launcher describes in the environment.

    Raises:
        ValueError: if its size is not num_replicas, or the device is missing.
        TimeoutError: if the other replicas don't turn up in time, or can't be reached.
    """
    try:
        world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    except KeyError as missing:
        raise ValueError(
            f"RANK is set in the environment, but {missing} is not: unset it, or use torchrun"
        ) from None
    if world_size != config.num_replicas:
        raise ValueError(
            f"the launcher started {world_size} processes, but num_replicas={config.num_replicas}: "
            f"pass --num-replicas {world_size}"
        )
    device = _device(config, local_rank)
    timeout = timedelta(seconds=config.timeout_seconds)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        exchange = _exchange(config, timeout)
    except RuntimeError as error:
        raise TimeoutError(
            f"the {world_size} replicas could not join at {os.environ.get('MASTER_ADDR')}: start them within "
            f"{config.timeout_seconds:g} s of each other, check the address, and name the network interface "
            f"between them in GLOO_SOCKET_IFNAME ({str(error).splitlines()[0]})"
        ) from error
    try:
        yield World(exchange, device, local_rank == 0, use_autocast(config, device))
    finally:
        dist.destroy_process_group()


def _exchange(config: TrainConfig, timeout: timedelta) -> Exchange:
    """Payloads travel through the CPU on gloo, which sends while the device computes."""
    if config.num_replicas == 1:
        return LoopbackExchange()
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every replica is a member"
    return ProcessGroupExchange(group, timeout_seconds=config.timeout_seconds)


def use_autocast(config: TrainConfig, device: torch.device) -> bool:
    """Whether the forward pass runs in bfloat16."""
    if config.precision != "auto":
        return config.precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch can't tell
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _device(config: TrainConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU here: pass --device cpu")
    num_gpus, num_local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.method == "data_parallel" and num_local > num_gpus:
        raise ValueError(f"data_parallel needs a GPU a replica: {num_local} replicas here, and {num_gpus} GPUs")
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device
