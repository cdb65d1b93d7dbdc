"""The papers' own numbers, as rows like ours; losses in nats a token of their tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.experiments.papers.experiment import Point
from diloco.scaling.published import LOSS, NUM_PARAMS

_Published = Mapping[str, Sequence[tuple[float, float, float, float, float]]]


def _rows(x: str, table: _Published) -> list[dict[str, Any]]:
    """Rows like ours, from x, loss, and accuracies in percent."""
    return [
        {
            "method": method,
            x: at,
            "eval_loss": loss,
            **{f"{t}_acc": a / 100 for t, a in zip(_TASKS, scores, strict=True)},
        }
        for method, points in table.items()
        for at, loss, *scores in points
    ]


_TASKS = ("hellaswag", "piqa", "arc_easy")
_SCALING: _Published = {
    "data_parallel": (
        (1.5e17, 3.51, 24.62, 57.89, 29.65),
        (9.4e17, 3.19, 26.94, 60.12, 30.35),
        (4e18, 2.97, 29.86, 63.71, 35.44),
        (1.4e19, 2.80, 33.46, 64.69, 34.91),
        (4.7e19, 2.67, 38.68, 66.49, 37.19),
        (1.9e20, 2.49, 46.60, 68.93, 39.65),
        (2e21, 2.25, 59.56, 72.42, 43.51),
    ),
    "diloco": (
        (1.5e17, 3.54, 24.53, 58.11, 29.65),
        (9.4e17, 3.21, 26.59, 60.50, 29.12),
        (4e18, 2.98, 29.71, 62.30, 33.68),
        (1.4e19, 2.81, 33.87, 64.74, 34.74),
        (4.7e19, 2.68, 38.37, 65.61, 36.32),
        (1.9e20, 2.49, 46.56, 68.82, 36.84),
    ),
    "streaming_overlapped_fp4": (
        (1.5e17, 3.53, 24.46, 57.67, 30.53),
        (9.4e17, 3.21, 26.97, 59.58, 31.40),
        (4e18, 2.98, 29.67, 61.92, 34.39),
        (1.4e19, 2.81, 33.66, 63.49, 35.09),
        (4.7e19, 2.67, 38.10, 66.21, 34.91),
        (1.9e20, 2.48, 46.60, 69.04, 39.12),
        (2e21, 2.26, 59.02, 72.52, 43.16),
    ),
}
SCALING = _rows("flops", _SCALING)
"""arXiv 2501.18512, Tables 6 and 7: C4, M = 2, H = 30, but H = 100 for Streaming DiLoCo at 4B."""

_OVERTRAINING: _Published = {
    "Data-Parallel": (
        (25e9, 2.67, 42.09, 67.35, 40.42),
        (100e9, 2.52, 49.78, 69.15, 44.03),
        (250e9, 2.45, 53.86, 70.45, 44.21),
    ),
    "Streaming, M=2": (
        (25e9, 2.66, 42.08, 67.46, 38.42),
        (100e9, 2.51, 49.98, 69.96, 44.03),
        (250e9, 2.45, 54.24, 71.38, 41.92),
    ),
    "Streaming, M=4": (
        (25e9, 2.73, 38.93, 66.92, 39.64),
        (100e9, 2.54, 48.35, 69.42, 40.52),
        (250e9, 2.47, 52.20, 70.29, 42.45),
    ),
}
OVERTRAINING = _rows("num_tokens", _OVERTRAINING)
"""arXiv 2501.18512, Tables 2 and 8: 1B parameters, Dolma, H = 100."""

EVALUATED_PARAMETERS = {"outer_parameters": 2.67, "replica_average": 2.68, "first_replica": 2.77}
EVALUATED_PARAMETERS_HELLASWAG = {"outer_parameters": 0.3778, "replica_average": 0.3772, "first_replica": 0.3777}
"""arXiv 2501.18512, Table 4: 500M parameters."""

FREEZING = {"": [Point("no", 2.6749, 2.6749, 2.6749), Point("yes", 3.2145, 3.2145, 3.2145)]}
"""arXiv 2501.18512: the loss of Streaming DiLoCo, and of FedPart."""

SINGLE_REPLICA: list[dict[str, Any]] = [
    {"method": method, "flops": 6 * num_params * 20 * num_params, "eval_loss": loss}
    for method, replicas in (("data_parallel", 0), ("diloco", 1))
    for num_params, loss in zip(NUM_PARAMS, LOSS[replicas], strict=True)
]
"""arXiv 2503.09799, Table 4."""
