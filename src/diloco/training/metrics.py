"""What a replica writes down of each step: `metrics-{replica}.jsonl`, and the same curves for TensorBoard."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

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
    """Of the inner optimizer."""
    grad_norm: float
    """Before clipping."""
    step_seconds: float
    """The whole step, sync included."""
    blocked_seconds: float
    """The part of it in which training waited for the network."""
    bytes_sent: int
    """Payload bytes sent in this step, each destination counted."""
    bytes_received: int
    """Payload bytes that were merged in this step."""
    outer_steps: tuple[dict[str, Any], ...] = ()
    """What `describe` says of each."""
    eval_loss: float | None = None
    """Held-out loss of the outer parameters, where this step measured it."""


def describe(outer_step: OuterStep, *, log_layer_cosine: bool) -> dict[str, Any]:
    """The numbers of an outer step that are worth keeping."""
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
    """Appends to a replica's metrics; a line is a step, and outlives the process when the step is over.

    Args:
        run: the run's directory.
        replica: whose metrics.
        after_step: the last step that counts; lines beyond it, of a run that was interrupted, are dropped.
    """

    def __init__(self, run: Path, replica: int, *, after_step: int) -> None:
        path = run / f"metrics-{replica}.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= after_step]
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text("".join(kept))
        unfinished.replace(path)
        self._file = path.open("a", buffering=1)
        self._curves = SummaryWriter(str(run / "tensorboard" / f"replica-{replica}"), purge_step=after_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Add a step."""
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
        """Until what was written outlives the machine, as a checkpoint does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write out what is left."""
        self._file.close()
        self._curves.close()


def _lines(path: Path) -> list[str]:
    """The whole lines of a file that may end in half of one."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
