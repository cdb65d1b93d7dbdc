"""The methods that `links.py` measures, by name; a method's options follow a colon.

payload                      32 MB each way at once
all_reduce:WIRE              torch's all-reduce of the gradients, alone and beside training
data_parallel:MB[,bf16]      DistributedDataParallel with buckets of so many megabytes
data_parallel_bf16:MB,bf16   the same with its bf16 hook
diloco, streaming, …         the methods of diloco.presets; `:τ` overlaps τ steps
torchft_diloco               torchft's streaming DiLoCo
alone                        inner steps without an exchange
"""

from collections.abc import Sequence

from diloco.presets import PRESETS
from diloco.training.config.config import TrainConfig

NUM_REPLICAS = 2
PEER = "torchft_diloco"
UNLIMITED_MBIT_S = 10_000.0
"""A bandwidth at which the link takes no time: the peer's own time remains."""
BUCKETS_MB = ("1", "4", "25")

NAMES = {
    "data_parallel": "Data-Parallel (DDP, FP32, best of 3 buckets)",
    "data_parallel_bf16": "Data-Parallel, bf16 hook",
    "diloco": "DiLoCo, FP32",
    "streaming": "Streaming, FP32",
    "streaming_overlapped": "Streaming, τ = 1, FP32",
    "streaming_overlapped_fp4": "Streaming, τ = 1, E3M0",
    "streaming_overlapped_fp4:9": "Streaming, τ = 9, E3M0",
    PEER: "torchft DiLoCo, τ = 9, FP32",
}
"""Titles in table and figure, in the figure's order."""
DEFAULT_METHODS = ("payload", *NAMES)


def variants(methods: Sequence[str]) -> list[str]:
    """The methods with their options; the all-reduce that a prediction needs stands before its method."""
    names = []
    for method in methods:
        if method.startswith("data_parallel") or method == PEER:
            wire = "bf16" if method == "data_parallel_bf16" else "fp32"
            hook = ",bf16" if wire == "bf16" else ""
            buckets = [] if method == PEER else [f"{method}:{size}{hook}" for size in BUCKETS_MB]
            names += [f"all_reduce:{wire}", *(buckets or [method])]
        else:
            names.append(method)
    return list(dict.fromkeys(names))


def is_training(method: str) -> bool:
    """True if a row holds the times of training steps."""
    return method.startswith(("data_parallel", *PRESETS, PEER))


def num_steps(method: str, config: TrainConfig, link_gbit_s: float, seconds: float) -> tuple[int, int]:
    """Steps before the measured ones, and measured steps: two periods of H after a first one.

    All steps of Data-Parallel are alike: where they are slow, as many are measured as fit into `seconds`.
    """
    period = config.diloco.sync_every
    if not method.startswith("data_parallel"):
        return period, 2 * period
    most = round(seconds / all_reduce_seconds(config, link_gbit_s))
    return (period, 2 * period) if most >= 3 * period else (2, max(4, min(2 * period, most)))


def all_reduce_seconds(config: TrainConfig, link_gbit_s: float) -> float:
    """Seconds for which an FP32 all-reduce of the gradients between two replicas fills a link."""
    return 32e-9 * config.model.num_matrix_params / link_gbit_s


def num_fragments(method: str, config: TrainConfig) -> int:
    """Fragments of blocks, and the one outside them; DiLoCo has one."""
    return 1 if method == "diloco" else 1 - -config.model.num_layers // config.diloco.layers_per_fragment
