"""The papers' own numbers, as rows like ours; losses in nats a token of their tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.experiments.papers.experiment import Point
from diloco.scaling.table import published_table

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
    ),
    "Streaming, H=100": (
        (1.5e17, 3.56, 24.80, 57.89, 29.12),
        (9.4e17, 3.22, 26.68, 60.39, 31.93),
        (4e18, 3.00, 29.27, 62.13, 34.21),
        (1.4e19, 2.83, 33.00, 63.71, 34.39),
        (4.7e19, 2.69, 37.40, 65.51, 34.74),
        (1.9e20, 2.50, 46.00, 68.82, 38.42),
        (2e21, 2.26, 59.02, 72.52, 43.16),
    ),
    "Streaming, M=4": (
        (1.5e17, 3.60, 24.50, 56.09, 28.60),
        (9.4e17, 3.25, 26.24, 59.74, 32.63),
        (4e18, 3.02, 29.09, 62.89, 35.44),
        (1.4e19, 2.84, 32.54, 64.42, 34.74),
        (4.7e19, 2.70, 36.95, 65.72, 35.26),
        (1.9e20, 2.50, 45.25, 67.95, 39.12),
    ),
    "Streaming, M=4, H=100": (
        (1.5e17, 3.64, 24.67, 56.75, 26.84),
        (9.4e17, 3.29, 26.54, 60.34, 29.82),
        (4e18, 3.05, 28.53, 61.10, 33.51),
        (1.4e19, 2.87, 32.02, 64.25, 35.44),
        (4.7e19, 2.73, 36.02, 66.27, 35.09),
        (1.9e20, 2.53, 44.74, 68.34, 38.25),
    ),
}
SCALING = _rows("flops", _SCALING)
"""arXiv 2501.18512, Tables 6 and 7: C4; M = 2 and H = 30 where the name does not say otherwise."""

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
    for num_params, loss in ((p.params, p.eval_loss) for p in published_table() if p.replicas == replicas)
]
"""arXiv 2503.09799, Table 4."""
