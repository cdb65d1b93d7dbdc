"""The section of an experiment: the claim, the finding, figures beside the paper's, and every run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError
from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.comparison import Row, finished
from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import read_rows
from diloco.report.figures.drawing import draw_panel, new_figure
from diloco.report.html.page import facts, figures, heading, paragraph, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HIDDEN = ("tier", "outer_hash")


def experiment_section(path: Path) -> str:
    """The section of the experiment whose CSV `diloco experiment` wrote.

    Raises:
        UserError: if the file is not named for an experiment, or lacks the column `tier`.
    """
    if path.stem not in EXPERIMENTS:
        raise UserError(
            f"{path} is neither a run's directory nor an experiment's CSV: those are named "
            f"{', '.join(f'{name}.csv' for name in EXPERIMENTS)}"
        )
    rows = read_rows(path)
    if any(row.get("tier") not in TIERS for row in rows):
        raise UserError(f"{path} has a row whose column 'tier' is none of {', '.join(TIERS)}")
    for number, row in enumerate(rows, start=1):
        for name in ("seed", "eval_loss", "num_params", "num_tokens") if "failed" not in row else ():
            if not isinstance(row.get(name), int | float):
                value = row.get(name, "")
                raise UserError(f"{path}, row {number}: {name} must be a number, not {value!r} (a decimal comma?)")
    return section_of(experiment(path.stem, TIERS[rows[0]["tier"]]()), rows)


def section_of(one: Experiment, rows: Sequence[Row]) -> str:
    """The section of an experiment with these rows."""
    failed = len(rows) - len(finished(rows))
    parts = [heading(one.name), paragraph(f"The paper ({one.source}): {one.claim}")]
    if finished(rows):
        measured, verdict = one.finding(rows)
        parts += [paragraph(f"Measured: {measured}."), facts({f"{one.name}: verdict": verdict})]
    runs = f"{len(rows)} of {len(one.runs)} runs" + (f", of which {failed} failed" if failed else "")
    parts += [
        figures(_figures(one, rows)),
        paragraph(f"{runs}; points are means over the seeds, bars their range."),
    ]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _HIDDEN]
    parts.append(table(names, ([_cell(row.get(name, "")) for name in names] for row in rows)))
    return "\n".join(parts)


def _figures(one: Experiment, rows: Sequence[Row]) -> "dict[str, Figure]":
    drawn = {}
    for panel in one.panels(rows):
        figure = new_figure(4.4, 3.3)
        draw_panel(panel, figure.subplots())
        whose = "the paper's numbers" if panel.published else "our numbers"
        drawn[f"{one.name}, {whose}: {panel.y_label} over {panel.x_label}. {panel.title}".strip(" .")] = figure
    return drawn


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
