"""The machines that run a grid, and its progress, for `diloco experiment` and `diloco sweep`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from diloco.errors import UserError
from diloco.experiments.runner.grid import LocalMachine, Machines


def machines_of(cores: int | None, ray: str | None) -> Machines:
    """This machine, or the Ray cluster at an address.

    Raises:
        UserError: if both are given.
    """
    if ray is None:
        return LocalMachine(cores)
    if cores is not None:
        raise UserError(
            f"cores={cores} are this machine's, and ray={ray} has its own: leave one out", "cores", "ray"
        )
    from diloco.experiments.runner.cluster import RayCluster

    return RayCluster(ray)


@contextmanager
def grid_progress(name: str) -> Iterator[Callable[[float], None]]:
    """A progress bar, or lines without a terminal; yields the callback that takes the part that is done."""
    first: list[tuple[float, float]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("ETA {task.fields[eta]}"), console=Console(stderr=True)) as progress:
        bar = progress.add_task(name, total=1.0, eta="?")

        def on_finished(part: float) -> None:
            now = time.monotonic()
            first.append((now, part))
            start, done = first[0]
            eta = str(timedelta(seconds=round((now - start) * (1 - part) / (part - done)))) if part > done else "?"
            progress.update(bar, completed=part, eta=eta)
            if not progress.console.is_terminal:
                progress.console.print(f"{name}: {part:.1%} done, ETA {eta}", highlight=False)

        yield on_finished
