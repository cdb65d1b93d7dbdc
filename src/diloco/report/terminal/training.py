"""A run in a terminal: its data while it is prepared, its steps while it trains, and its results."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.text import Text

from diloco.data.prepare import PrepareProgress, ProgressCallback
from diloco.training.config.config import TrainConfig
from diloco.training.records.metrics import StepMetrics
from diloco.training.records.summary import Outcome

if TYPE_CHECKING:
    from diloco.rendezvous.store_rendezvous import StoreRendezvous

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def preparation_progress(console: Console) -> Iterator[ProgressCallback]:
    """A callback for `prepare` that shows its progress in a line, if the console is a terminal."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("")

    def show(progress: PrepareProgress) -> None:
        """Update the line."""
        bar.start()
        bar.update(
            task,
            description=f"{progress.stage}: {progress.num_documents:,} documents, {progress.num_bytes:,} bytes, "
            f"{progress.num_tokens:,} tokens",
        )

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


class TrainingProgress:
    """One replica's progress since it started: two live lines in a terminal, elsewhere a line every 10 seconds.

    Args:
        config: the run's.
        console: to write to.
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
        self._tokens_before = 0
        self._loss = 0.0
        self._eval_loss: float | None = None
        self._last_line = time.monotonic()

    def started(self, step: int, rendezvous: "StoreRendezvous | None", *, is_resume: bool) -> None:
        """Show the replica's place in the run that it has joined, and the step from which a resume goes on."""
        if rendezvous is not None:
            self._joined(rendezvous)
        if is_resume:
            self._resumed(step)

    def _joined(self, rendezvous: "StoreRendezvous") -> None:
        state, own = rendezvous.state, rendezvous.replica
        others = [state.members[each].name for each in state.active if each != own]
        beside = f"beside {', '.join(others)}" if others else "alone" if own else "the first of a new run"
        num_rounds = max(log.round for log in state.fragments)
        line = f"store {self._config.rendezvous}: replica {own}, {beside}; round {num_rounds}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _resumed(self, step: int) -> None:
        anew = "no step was saved by every replica: starting over"
        if self._config.rendezvous is not None:
            anew = "no checkpoint was saved: starting from the run's outer parameters"
        line = f"going on from step {step}" if step else anew
        self._console.print(line, highlight=False)

    def __call__(self, metrics: StepMetrics) -> None:
        """Show a step."""
        self._loss = 0.9 * self._loss + 0.1 * metrics.loss if self._num_steps else metrics.loss
        if not self._num_steps:
            self._tokens_before = metrics.tokens - self._config.tokens_per_step
        self._num_steps += 1
        self._seconds += metrics.step_seconds
        self._blocked_seconds += metrics.blocked_seconds
        self._bytes_sent += metrics.bytes_sent
        if metrics.eval_loss is not None:
            self._eval_loss = metrics.eval_loss
            whose = " of replica 0's share of the text" if self._config.num_local_replicas > 1 else ""
            line = f"step {metrics.step}  held-out loss {metrics.eval_loss:.4f}{whose}"
            self._console.print(line, highlight=False, soft_wrap=True)
        if self._console.is_terminal:
            self._view.start()
            self._line.plain = self._status(metrics)
            self._bar.update(self._task, completed=self._run_step(metrics), eta=self._eta(metrics))
        elif self._is_time_for_a_line() or metrics.tokens >= self._config.num_tokens:
            self._console.print(f"{self._status(metrics)}  {self._eta(metrics)}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live lines."""
        self._view.stop()

    def _status(self, metrics: StepMetrics) -> str:
        where = f"step {metrics.step}/{self._config.num_steps}"
        if self._config.rendezvous is not None:
            where = f"step {metrics.step}, {metrics.tokens / self._config.num_tokens:.1%} of the run"
        return (
            f"{where}  loss {self._loss:.3f}  "
            + ("" if self._eval_loss is None else f"held-out {self._eval_loss:.3f}  ")
            + f"{(metrics.tokens - self._tokens_before) / self._seconds:,.0f} tokens/s  "
            f"compute utilization {1 - self._blocked_seconds / self._seconds:.1%}  "
            f"sent {megabytes(self._bytes_sent)}"
            + "".join(f"  {part}" for part in _of_gpu(metrics.model_flops_utilization, metrics.peak_memory_bytes))
        )

    def _run_step(self, metrics: StepMetrics) -> float:
        """The run's progress, in steps of the global batch"""
        return metrics.tokens / self._config.tokens_per_step

    def _eta(self, metrics: StepMetrics) -> str:
        num_left = max(0, self._config.num_tokens - metrics.tokens)
        seconds = num_left * self._seconds / (metrics.tokens - self._tokens_before)
        return f"ETA {duration(seconds)}"

    def _is_time_for_a_line(self) -> bool:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True


def print_outcome(config: TrainConfig, outcome: Outcome, console: Console) -> None:
    """Print the held-out loss, bytes beside Data-Parallel's, the run's directory, and a sample."""
    summary = outcome.summary
    sent, data_parallel = summary["bytes_sent_per_replica"], summary["data_parallel_bytes_per_replica"]
    gpu = _of_gpu(summary["model_flops_utilization"], summary["peak_memory_bytes"])
    error = f" ± {summary['eval_standard_error']:.4f}" if summary["eval_standard_error"] is not None else ""
    rows = {
        "held-out loss": f"{summary['eval_loss']:.4f}{error} nats a token (of the outer parameters)",
        "bits per byte": f"{summary['eval_bits_per_byte']:.4f}",
        "trained on": f"{summary['num_tokens']:,} tokens in {summary['wall_seconds']:.0f} s: "
        f"{summary['num_trained_params']:,} parameters, {summary['num_replicas']} replicas",
        "speed": ", ".join([f"{summary['tokens_per_second']:,.0f} tokens/s", *gpu]),
        **({"contributors": _shares(summary["contributors"])} if "contributors" in summary else {}),
        "compute utilization": f"{summary['compute_utilization']:.1%}",
        "sent per replica": megabytes(sent),
        **({"Data-Parallel": _of_data_parallel(data_parallel, sent)} if data_parallel else {}),
        "outer hash": summary["outer_hash"][:16],
        "files": str(config.directory),
    }
    for name, value in rows.items():
        console.print(f"{name:21}{value}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nThe model writes:\n\n{printable(outcome.sample)}", highlight=False, markup=False)


def printable(text: str) -> str:
    """A model's text as it may be sent to a terminal, which obeys control characters: U+FFFD in their place.

    >>> printable("a\\tb\\n\\x1b]0;title\\x07")
    'a\\tb\\n\ufffd]0;title\ufffd'
    """
    return _CONTROLS.sub("\ufffd", text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _of_gpu(model_flops_utilization: float | None, peak_memory_bytes: int | None) -> list[str]:
    """A GPU's utilization and memory, as far as they are known."""
    mfu, peak = model_flops_utilization, peak_memory_bytes
    return ([] if mfu is None else [f"MFU {mfu:.1%}"]) + ([] if peak is None else [f"memory {megabytes(peak)}"])


def _of_data_parallel(data_parallel: float, sent: float) -> str:
    more = f", {data_parallel / sent:,.0f}× as much" if sent else ""
    return f"would have sent {megabytes(data_parallel)} in FP32{more}"


def _shares(contributors: Mapping[str, Mapping[str, int]]) -> str:
    total = sum(part["tokens"] for part in contributors.values())
    return ", ".join(f"{name} {part['tokens'] / total:.1%}" for name, part in contributors.items())


def duration(seconds: float) -> str:
    """A time in minutes and seconds, from an hour on with the hours.

    >>> duration(9.6), duration(3723)
    ('0:09', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(num_bytes: float) -> str:
    """A number of bytes in MB; in kB below a tenth of one, in GB from a thousand on.

    >>> megabytes(30_200), megabytes(2_540_000), megabytes(3.2e9)
    ('30.2 kB', '2.54 MB', '3.20 GB')
    """
    if num_bytes < 1e5:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
