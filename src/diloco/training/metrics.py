"""The metrics of each step of a replica: `metrics-{replica}.jsonl`, and the same curves for TensorBoard."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from diloco.errors import UserError
from diloco.outer.step import OuterStep


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One inner step of one replica."""

    step: int
    """t, from 1."""
    tokens: int
    """Tokens that all replicas together have trained on so far."""
    loss: float
    """Cross-entropy of this replica's batch, nats a token."""
    learning_rate: float
    """Learning rate of the inner optimizer."""
    grad_norm: float
    """Gradient norm before clipping."""
    step_seconds: float
    """Time of the whole step, sync included."""
    blocked_seconds: float
    """Time in which training waited for the network, a part of `step_seconds`."""
    bytes_sent: int
    """Payload bytes sent in this step, each destination counted."""
    bytes_received: int
    """Payload bytes that were merged in this step."""
    outer_steps: tuple[dict[str, Any], ...] = ()
    """The outer steps taken, each as `describe` gives it."""
    eval_loss: float | None = None
    """Held-out loss of the outer parameters, nats a token, if it was measured after this step."""


def describe(outer_step: OuterStep, *, log_layer_cosine: bool) -> dict[str, Any]:
    """The fragment, round, norm and cosines of an outer step."""
    described: dict[str, Any] = {
        "fragment": outer_step.sync.fragment,
        "round": outer_step.sync.round,
        "sent_step": outer_step.sync.step,
        "blocked_seconds": outer_step.blocked_seconds,
        "outer_gradient_norm": outer_step.norm(),
        "cosine": outer_step.mean_cosine(),
    }
    if log_layer_cosine:
        described["layer_cosine"] = {block: outer_step.mean_cosine(block) for block in outer_step.spans}
    return described


class MetricsLog:
    """Appends a line for each step to a replica's metrics; the line survives the process from then on.

    Args:
        run: the run's directory.
        replica: the replica's number.
        after_step: the last step to keep; lines after it, of a run that was interrupted, are dropped.

    Raises:
        UserError: if the metrics of an earlier part of the run are damaged.
    """

    def __init__(self, run: Path, replica: int, *, after_step: int) -> None:
        path = run / f"metrics-{replica}.jsonl"
        kept = [line for line in _lines(path) if _step(line, path) <= after_step]
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text("".join(kept))
        unfinished.replace(path)
        self._file = path.open("a", buffering=1)
        self._curves = SummaryWriter(str(run / "tensorboard" / f"replica-{replica}"), purge_step=after_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step."""
        values = asdict(metrics)
        self._file.write(json.dumps({k: v for k, v in values.items() if v not in (None, ())}) + "\n")
        for name, value in values.items():
            if isinstance(value, float | int) and name != "step":
                self._curves.add_scalar(name, value, metrics.step)
        for outer_step in metrics.outer_steps:
            for name in ("outer_gradient_norm", "cosine"):
                if outer_step[name] is not None:
                    self._curves.add_scalar(
                        f"{name}/fragment_{outer_step['fragment']}", outer_step[name], metrics.step
                    )

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write out what is buffered, and close the files."""
        self._file.close()
        self._curves.close()


def _lines(path: Path) -> list[str]:
    """The complete lines of a file whose last line may be incomplete."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str, path: Path) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or move it away to resume without it") from None
