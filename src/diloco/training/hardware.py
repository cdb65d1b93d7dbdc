"""The device on which a process computes, and how fast it is."""

import logging
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from diloco.errors import UserError

_LOG = logging.getLogger("diloco")


def chosen_device(asked: str, local_rank: int, *, shares: bool) -> torch.device:
    """The device of a process, by its number on this machine; a GPU becomes the current one.

    Args:
        asked: auto, cpu, cuda or mps; auto is cuda where there is such a GPU.
        local_rank: the number.
        shares: True if several processes may have the same GPU.

    Raises:
        UserError: if there is no such GPU, or too few.
    """
    check_there(asked)
    if asked == "mps":
        if not shares:
            raise UserError(
                "device=mps with data_parallel or a replica of several processes: torch sends nothing from an "
                "Apple GPU; take one process per replica, or device=cpu",
                *("device", "method", "shards_per_replica", "ddp_per_replica"),
            )
        return torch.device("mps")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus, num_local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local > num_gpus and not shares:
        raise UserError(
            f"data_parallel and a replica of several processes need a GPU a process: here are {num_local} "
            f"processes and {num_gpus} GPUs; lower num_replicas, shards_per_replica or ddp_per_replica",
            *("num_replicas", "shards_per_replica", "ddp_per_replica"),
        )
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device


def check_there(asked: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        UserError: naming it.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch finds no GPU here: set device=cpu", "device")
    if asked == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps, but torch finds no Apple GPU here: set device=cpu", "device")


def chosen_precision(asked: str, device: torch.device) -> str:
    """The precision of a device's forward passes, for a config's `precision`: `auto` is bf16 or fp32."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = device.type == "cpu" and bool(_cpu_has_bf16())  # mps: not tried yet, only where it is asked for
    return "bf16" if has_bf16 else "fp32"


def warn_of_emulation(precision: str, device: torch.device) -> None:
    """Say what bfloat16 costs on a processor that has no instructions for it."""
    if precision.startswith("bf16") and device.type == "cpu" and _cpu_has_bf16() is False:
        _LOG.warning(
            "precision=%s on a processor without instructions for bfloat16: a step may take ten times as long as "
            "with precision=fp32",
            precision,
        )


def _cpu_has_bf16() -> bool | None:
    """True if the processor has instructions for bfloat16; None with a version of torch that can't tell."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


DENSE_BF16_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Floating-point operations a second in bfloat16, sums in FP32, without sparsity, by NVIDIA's data sheets; by the
first part of a GPU's name that is found in this order, before no letter, digit, Ti or Laptop."""


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations a second that a device can do in bfloat16; None if that is not known."""
    if device.type != "cuda":
        return None
    return flops_of(torch.cuda.get_device_name(device))


def flops_of(name: str) -> float | None:
    """The entry of a GPU's name.

    >>> flops_of("NVIDIA H100 80GB HBM3"), flops_of("NVIDIA H100 PCIe"), flops_of("NVIDIA RTX A4000")
    (989000000000000.0, 756000000000000.0, None)
    """
    flops_by_part = DENSE_BF16_FLOPS.items()
    return next((flops for part, flops in flops_by_part if re.search(rf"{part}(?!\w| Ti| Laptop)", name)), None)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that was queued there."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def machine_name(device: torch.device) -> str:
    """The name of a GPU, or of the processor and how many cores a process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(names, name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory of a GPU that this process's tensors have taken so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def model_flops_utilization(step_flops: float, device: torch.device, step_seconds: float) -> float | None:
    """The model's operations in a step over those that the device can do in that time; None if it is unknown."""
    peak = peak_flops(device)
    return None if peak is None else step_flops / step_seconds / peak
