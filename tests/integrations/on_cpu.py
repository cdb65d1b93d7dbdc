"""torchtitan and its integration, imported for the CPU: it asks for things that torch.cpu doesn't have."""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


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


if importlib.util.find_spec("triton") is None:  # which its mixture-of-experts kernels import
    kernels: Any = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    patch.setattr(torch._utils, "_get_device_module", lambda device_type: CPU)
    pytest.importorskip("torchtitan.tools.utils")
importlib.import_module("diloco.integrations.torchtitan")
