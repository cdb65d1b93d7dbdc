"""The processes of one replica, as a launcher or the framework describes them."""

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from diloco.errors import UserError


@dataclass(frozen=True)
class Site:
    """This process among those of its replica."""

    rank: int
    """The number of this process, from 0."""
    size: int
    """The number of processes."""
    job: str | None
    """A name of the job that started them, which no other job has at the same time; None without a launcher."""


def this_site() -> Site:
    """The site that torch.distributed, or else the environment, describes (RANK and WORLD_SIZE, as torchrun sets).

    Raises:
        UserError: if the environment describes no whole numbers.
    """
    if dist.is_initialized():
        return Site(dist.get_rank(), dist.get_world_size(), _job())
    try:
        return Site(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), _job())
    except ValueError as error:
        raise UserError(f"RANK and WORLD_SIZE in the environment must be whole numbers: {error}") from None


def _job() -> str | None:
    """The address at which the processes of the job meet: two jobs of a machine can't share a port."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    # Lightning's launcher sets no RANK.
    has_launcher = "RANK" in os.environ or (dist.is_initialized() and dist.get_world_size() > 1)
    if not address or not port or not has_launcher:
        return None
    is_local = address == "localhost" or address.startswith("127.") or address == "::1"
    return f"{socket.gethostname() + '/' if is_local else ''}{address}:{port}"
