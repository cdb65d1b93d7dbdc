"""A run while it goes on: two live lines in a terminal, a line now and then elsewhere."""

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from diloco.training.config import TrainConfig
from diloco.training.metrics import StepMetrics

_SECONDS_BETWEEN_LINES = 10.0


class TrainingProgress:
    """Told of each step of one replica, shows where the run is; figures are those since it was started.

    Args:
        config: of the run, for its length.
        console: where to write.
    """

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._config, self._console = config, console
        self._bar = Progress(
            BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("{task.fields[eta]}"), expand=True
        )
        self._task = self._bar.add_task("train", total=config.num_steps, eta="")
        self._line = Text()
        self._view = Live(Group(self._line, self._bar), console=console)
        self._num_steps, self._seconds, self._blocked_seconds, self._bytes_sent = 0, 0.0, 0.0, 0
        self._loss = 0.0
        self._last_line = time.monotonic()

    def resumed(self, step: int) -> None:
        """Show where the run goes on from."""
        where = f"going on from step {step}" if step else "no step was saved by every replica: starting over"
        self._console.print(where, highlight=False)

    def __call__(self, metrics: StepMetrics) -> None:
        """Show a step."""
        self._loss = 0.9 * self._loss + 0.1 * metrics.loss if self._num_steps else metrics.loss
        self._num_steps += 1
        self._seconds += metrics.step_seconds
        self._blocked_seconds += metrics.blocked_seconds
        self._bytes_sent += metrics.bytes_sent
        if self._console.is_terminal:
            self._view.start()
            self._line.plain = self._status(metrics)
            self._bar.update(self._task, completed=metrics.step, eta=self._eta(metrics))
        elif self._is_time_for_a_line() or metrics.step == self._config.num_steps:
            self._console.print(f"{self._status(metrics)}  {self._eta(metrics)}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._view.stop()

    def _status(self, metrics: StepMetrics) -> str:
        return (
            f"step {metrics.step}/{self._config.num_steps}  loss {self._loss:.3f}  "
            f"{self._num_steps * self._config.tokens_per_step / self._seconds:,.0f} tokens/s  "
            f"compute utilization {1 - self._blocked_seconds / self._seconds:.1%}  "
            f"sent {megabytes(self._bytes_sent)}"
        )

    def _eta(self, metrics: StepMetrics) -> str:
        seconds = (self._config.num_steps - metrics.step) * self._seconds / self._num_steps
        return f"ETA {int(seconds // 60)}:{int(seconds % 60):02}"

    def _is_time_for_a_line(self) -> bool:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True


def megabytes(num_bytes: float) -> str:
    """A number of bytes in MB, or GB from a thousand on.

    >>> megabytes(2_540_000), megabytes(3.2e9)
    ('2.54 MB', '3.20 GB')
    """
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
