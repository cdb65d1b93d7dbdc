"""A run while it goes on: one live line in a terminal, a line now and then elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from diloco.training.config import TrainConfig
from diloco.training.metrics import StepMetrics

_SECONDS_BETWEEN_LINES = 10.0


class TrainingProgress:
    """Told of each step of one replica, shows where the run is.

    Args:
        config: of the run, for its length.
        console: where to write.
    """

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._config, self._console = config, console
        self._live = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.fields[status]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not self._live,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=config.num_steps, status="starting")
        self._started, self._first_step, self._last_line = time.monotonic(), 0, time.monotonic()
        self._loss, self._seconds, self._blocked, self._bytes = 0.0, 0.0, 0.0, 0

    def __call__(self, metrics: StepMetrics) -> None:
        """Show a step."""
        if not self._seconds:
            self._first_step, self._loss = metrics.step, metrics.loss
            self._bar.start()
        self._loss = 0.9 * self._loss + 0.1 * metrics.loss
        self._seconds += metrics.step_seconds
        self._blocked += metrics.blocked_seconds
        self._bytes += metrics.bytes_sent
        self._bar.update(self._task, completed=metrics.step, status=self._status(metrics))
        now = time.monotonic()
        if not self._live and (now - self._last_line > _SECONDS_BETWEEN_LINES or self._is_last(metrics)):
            self._last_line = now
            self._console.print(
                f"{self._status(metrics)}  ETA {self._eta_seconds(metrics):.0f} s", highlight=False
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()

    def _status(self, metrics: StepMetrics) -> str:
        tokens = (metrics.step - self._first_step + 1) * self._config.tokens_per_step
        return (
            f"step {metrics.step}/{self._config.num_steps}  loss {self._loss:.3f}  "
            f"{tokens / self._seconds:,.0f} tokens/s  "
            f"compute utilization {1 - self._blocked / self._seconds:.1%}  sent {megabytes(self._bytes)}"
        )

    def _is_last(self, metrics: StepMetrics) -> bool:
        return metrics.step == self._config.num_steps

    def _eta_seconds(self, metrics: StepMetrics) -> float:
        done = metrics.step - self._first_step + 1
        return (self._config.num_steps - metrics.step) * (time.monotonic() - self._started) / done


def megabytes(num_bytes: float) -> str:
    """A number of bytes in MB, or GB from a thousand on.

    >>> megabytes(2_540_000), megabytes(3.2e9)
    ('2.54 MB', '3.20 GB')
    """
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
