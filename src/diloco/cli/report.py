"""`diloco report`: one HTML page about runs and experiments."""

from collections.abc import Mapping
from pathlib import Path

import tyro

from diloco.cli._command import call
from diloco.cli._source import source
from diloco.errors import UserError
from diloco.report.html.comparison_section import comparison_section
from diloco.report.html.experiment_section import experiment_section
from diloco.report.html.page import write_page
from diloco.report.html.run_section import RunRecord, read_run, run_section
from diloco.report.html.store_section import store_section

HELP = "one HTML page about runs and experiments: diloco report RUN_OR_CSV … [--output FILE]"
ORDER = 9


def run(arguments: list[str]) -> None:
    """Report on the runs and experiments that a command line names."""
    call(_report, arguments, prog="diloco report")


def _report(sources: tyro.conf.Positional[tuple[str, ...]], output: Path = Path("report.html")) -> None:
    """Write one self-contained HTML page about runs and experiments; several runs are compared at its top.

    Args:
        sources: Directories of runs, URLs of stores in which replicas meet, and CSV files that `diloco experiment`
            wrote.
        output: File to write the page to.
    """
    if not sources:
        raise UserError("name a run's directory, or an experiment's CSV")
    named = [source(text) for text in sources]
    records = {path: read_run(path) for path in named if isinstance(path, Path) and path.suffix != ".csv"}
    sections = [store_section(one) if isinstance(one, str) else _section(one, records) for one in named]
    if len(records) > 1:
        sections.insert(0, comparison_section(list(records.values())))
    write_page(f"diloco: {', '.join(Path(text).name for text in sources[:4])}", sections, output)
    print(output)


def _section(path: Path, records: Mapping[Path, RunRecord]) -> str:
    return run_section(records[path]) if path in records else experiment_section(path)
