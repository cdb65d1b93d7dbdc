"""`diloco report`: one HTML page about runs and experiments."""

from pathlib import Path

import tyro

from diloco.cli._command import call
from diloco.cli._source import source
from diloco.errors import UserError
from diloco.report.html.experiment_section import experiment_section
from diloco.report.html.page import write_page
from diloco.report.html.run_section import run_section
from diloco.report.html.store_section import store_section

HELP = "one HTML page about runs and experiments: diloco report RUN_OR_CSV … [--output FILE]"
ORDER = 9


def run(arguments: list[str]) -> None:
    """Report on the runs and experiments that a command line names."""
    call(_report, arguments, prog="diloco report")


def _report(sources: tyro.conf.Positional[tuple[str, ...]], output: Path = Path("report.html")) -> None:
    """Write one self-contained HTML page about runs and experiments.

    Args:
        sources: Directories of runs, URLs of stores in which replicas meet, and CSV files that `diloco experiment`
            wrote.
        output: File to write the page to.
    """
    if not sources:
        raise UserError("name a run's directory, or an experiment's CSV")
    names = ", ".join(Path(text).stem for text in sources[:4])
    write_page(f"diloco: {names}", [_section(source(text)) for text in sources], output)
    print(output)


def _section(run: Path | str) -> str:
    if isinstance(run, str):
        return store_section(run)
    return experiment_section(run) if run.suffix == ".csv" else run_section(run)
