"""Text while it is prepared."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from diloco.data.prepare import PrepareProgress, ProgressCallback


@contextmanager
def preparation_progress(console: Console) -> Iterator[ProgressCallback]:
    """What to tell `prepare`, to see in a terminal how far it is; nothing is shown where it has nothing to do."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("")

    def show(progress: PrepareProgress) -> None:
        """Bring the line up to date."""
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
