"""torchtitan and its integration, imported for the CPU: it asks for things that torch.cpu doesn't have."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed


class CPU:
    """torch.cpu, and the names of torch.cuda that torchtitan's Trainer uses."""

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: Any) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any) -> Any:
        return SimpleNamespace(total_memory=2**30)

    @staticmethod
    def memory_stats(device: Any) -> dict[str, int]:
        return {}

    @staticmethod
    def reset_peak_memory_stats() -> None: ...

    @staticmethod
    def empty_cache() -> None: ...


if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.14
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    patch.setattr(torch._utils, "_get_device_module", lambda device_type: CPU)
    pytest.importorskip("torchtitan.tools.utils")
importlib.import_module("diloco.integrations.torchtitan")
