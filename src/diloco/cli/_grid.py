"""The machines that run a grid, and its progress, for `diloco experiment` and `diloco sweep`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live

from diloco.errors import UserError
from diloco.experiments.runner.grid import GridProgress
from diloco.experiments.runner.machines import LocalMachine, Machines, RayCluster
from diloco.report.terminal.screen import Screen
from diloco.report.terminal.watching import GridView

_SECONDS_IN_A_TERMINAL = 1.0
_SECONDS_BETWEEN_LINES = 30.0


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
    return RayCluster(ray)


@contextmanager
def grid_progress(name: str) -> Iterator[Callable[[GridProgress], None]]:
    """Lines that are kept up to date, or printed now and then without a terminal; yields a callback for news."""
    console = Screen(stderr=True)
    view, over, is_terminal = GridView(name), threading.Event(), console.is_terminal

    def show(live: Live) -> None:
        if is_terminal:
            live.update(view.rendered(), refresh=True)
        else:
            console.print(view.rendered(), highlight=False, soft_wrap=True)

    def show_again(live: Live) -> None:
        while not over.wait(_SECONDS_IN_A_TERMINAL if is_terminal else _SECONDS_BETWEEN_LINES):
            if view.progress is not None:
                show(live)

    with Live(console=console, auto_refresh=False, transient=not is_terminal) as live:

        def on_progress(progress: GridProgress) -> None:
            is_first, view.progress = view.progress is None, progress
            if is_terminal or is_first or progress.preparing is None:
                show(live)

        thread = threading.Thread(target=show_again, args=(live,), daemon=True)
        thread.start()
        try:
            yield on_progress
        finally:
            over.set()
            thread.join()
