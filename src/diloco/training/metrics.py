"""The metrics of each step of a replica: `metrics-{replica}.jsonl`, and the same curves for trackers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.integrations.trackers import Tracker
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
    mean_loss: float | None = None
    """Mean loss of all replicas between two syncs, nats a token, where the second of them was merged."""
    engine: Mapping[str, float] = field(default_factory=dict)
    """The engine's `logs()`, once a round: when fragment 0 was merged."""
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
        trackers: where the curves go, too; closed with this log.

    Raises:
        UserError: if the metrics of an earlier part of the run are damaged.
    """

    def __init__(self, run: Path, replica: int, *, after_step: int, trackers: Sequence[Tracker] = ()) -> None:
        path = run / f"metrics-{replica}.jsonl"
        kept = [line for line in _lines(path) if _step(line, path) <= after_step]
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text("".join(kept))
        unfinished.replace(path)
        self._file = path.open("a", buffering=1)
        self._trackers = trackers

    def write(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step."""
        values = asdict(metrics)
        self._file.write(json.dumps({k: v for k, v in values.items() if v not in (None, (), {})}) + "\n")
        curves = {k: v for k, v in values.items() if isinstance(v, float | int) and k != "step"}
        curves["tokens_per_second"] = metrics.tokens / metrics.step / metrics.step_seconds
        curves |= {f"engine/{name}": value for name, value in metrics.engine.items()}
        for outer_step in metrics.outer_steps:
            for name in ("outer_gradient_norm", "cosine"):
                if outer_step[name] is not None:
                    curves[f"{name}/fragment_{outer_step['fragment']}"] = outer_step[name]
        for tracker in self._trackers:
            tracker.log(curves, metrics.step)

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write out what is buffered, and close the files."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


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
