"""What the papers print of the experiments, as rows like ours; loss in nats a token of their tokenizers."""

from typing import Any

from diloco.experiments.experiment import Point
from diloco.scaling.published import LOSS, NUM_PARAMS

_FLOPS = (1.5e17, 9.4e17, 4e18, 1.4e19, 4.7e19, 1.9e20, 2e21)  # 35M, 100M, 200M, 300M, 500M, 1B, 4B
_SCALING = {
    "data_parallel": (3.51, 3.19, 2.97, 2.80, 2.67, 2.49, 2.25),
    "diloco": (3.54, 3.21, 2.98, 2.81, 2.68, 2.49),
    "streaming": (3.53, 3.21, 2.98, 2.81, 2.67, 2.48),
}
SCALING: list[dict[str, Any]] = [
    {"method": method, "flops": flops, "eval_loss": loss}
    for method, losses in _SCALING.items()
    for flops, loss in zip(_FLOPS, losses, strict=False)
]
"""arXiv 2501.18512, Table 6: C4, M = 2, H = 30; 4B was trained with H = 100 alone."""

_OVERTRAINING = {"data_parallel": (2.67, 2.52, 2.45), "streaming": (2.66, 2.51, 2.45)}
OVERTRAINING: list[dict[str, Any]] = [
    {"method": method, "tokens": tokens, "eval_loss": loss}
    for method, losses in _OVERTRAINING.items()
    for tokens, loss in zip((25e9, 100e9, 250e9), losses, strict=True)
]
"""Of the same paper, Table 2: 1B parameters, Dolma, M = 2, H = 100."""

EVALUATED_PARAMETERS = {"outer_parameters": 2.67, "replica_average": 2.68, "first_replica": 2.77}
"""Of the same paper, Table 4: 500M parameters."""

FREEZING = {"": [Point("no", 2.6749, 2.6749, 2.6749), Point("yes", 3.2145, 3.2145, 3.2145)]}
"""Of the same paper: loss of Streaming DiLoCo, and of FedPart."""

SINGLE_REPLICA: list[dict[str, Any]] = [
    {"method": method, "flops": 6 * num_params * 20 * num_params, "eval_loss": loss}
    for method, replicas in (("data_parallel", 0), ("diloco", 1))
    for num_params, loss in zip(NUM_PARAMS, LOSS[replicas], strict=True)
]
"""arXiv 2503.09799, Table 4."""
