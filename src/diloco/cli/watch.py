"""`diloco watch`: runs and stores while they go on, in the terminal or on a page in the browser."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from diloco.cli._command import call, train_command
from diloco.cli._serving import check_serving, serve_page
from diloco.errors import UserError
from diloco.training.config.config import TrainConfig

if TYPE_CHECKING:
    from diloco.report.sources import Sources

HELP = "runs while they go on, in the terminal or on a live page: diloco watch [RUN|DIR|STORE …] [--serve]"
ORDER = 3


def run(arguments: list[str]) -> None:
    """Watch what a command line names."""
    call(_watch, arguments, prog="diloco watch")


def _watch(
    sources: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|DIR|STORE …")],
    serve: bool = False,
    port: int = 0,
    address: str = "",
    every_seconds: float = 2.0,
) -> None:
    """Show runs and stores until they are finished or stopped, or until Ctrl-C; nothing is written.

    Args:
        sources: Directories of runs, directories with several runs, which are compared, and directories or URLs of
            stores in which replicas meet. Left out, the newest run in runs/.
        serve: Serve a page with curves to this machine's browsers, and print its address.
        port: Port of the page; 0 takes a free one.
        address: Address of this machine on which other devices reach the page, too, such as 0.0.0.0 for all of its
            addresses; the URL has a random token then. Without it, 127.0.0.1.
        every_seconds: Time between two looks in the terminal.
    """
    if not 0 < every_seconds <= 86_400:
        raise UserError(f"every_seconds={every_seconds} must be above 0 and at most 86400", "every_seconds")
    check_serving(serve, port=port, address=address)
    from diloco.report.sources import Sources
    from diloco.training.records.runs import newest_runs

    sources = sources or tuple(map(str, newest_runs(TrainConfig.runs)[:1]))
    if not sources:
        raise UserError("name a run's directory, a directory of runs, or a store")
    looked_at = Sources(sources, command_of=train_command)
    looked_at.check()
    if serve:
        title = f"diloco: {', '.join(Path(source).name or source for source in sources[:4])}"
        serve_page(looked_at, title, port=port, address=address)
    else:
        _show(looked_at, every_seconds)


def _show(sources: "Sources", every_seconds: float) -> None:
    """Show the state since the first look, in place on a terminal, and elsewhere one below the other."""
    from rich.live import Live

    from diloco.report.terminal.screen import Screen
    from diloco.report.terminal.watching import page_view

    console = Screen()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if not sources.is_behind:
                view = page_view(sources.page(with_charts=False))
                if console.is_terminal:
                    live.update(view, refresh=True)
                else:
                    console.print(view)
                if sources.is_over:
                    return
                time.sleep(every_seconds)
            sources.again()
