"""`diloco report`: one HTML page about runs, stores and experiments."""

import time
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from diloco.cli._command import call, train_command
from diloco.errors import UserError
from diloco.report.experiments import experiment_section
from diloco.report.page import write_page
from diloco.report.setup import moment
from diloco.report.sources import Sources

HELP = "one HTML page about runs and experiments: diloco report RUN_OR_CSV … [--output FILE]"
ORDER = 9


def run(arguments: list[str]) -> None:
    """Report on the runs and experiments that a command line names."""
    call(_report, arguments, prog="diloco report")


_Sources: TypeAlias = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|DIR|CSV …")]


def _report(sources: _Sources, output: Path = Path("report.html")) -> None:
    """Write one self-contained HTML page about runs and experiments: the page of `diloco watch`, as it is now.

    Args:
        sources: Directories of runs, or directories with several runs, which are compared at the top; URLs of
            stores in which replicas meet; CSV files that `diloco experiment` wrote.
        output: File to write the page to.
    """
    if not sources:
        raise UserError("name a run's directory, or an experiment's CSV")
    tables = [Path(text) for text in sources if Path(text).suffix == ".csv"]
    others = Sources([text for text in sources if Path(text).suffix != ".csv"], command_of=train_command)
    others.read()
    page = others.page()
    page.date = f"as of {moment(time.time())}"
    page.sections = [*page.sections, *map(experiment_section, tables)]
    write_page(f"diloco: {', '.join(Path(text).name for text in sources[:4])}", page, output)
    print(output)
