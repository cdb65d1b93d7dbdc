"""The section of an experiment: the claim, the finding, figures beside the paper's, and every run."""

from pathlib import Path

from diloco.errors import UserError
from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.comparison import finished
from diloco.experiments.papers.experiment import Panel
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import read_rows
from diloco.report.page import Chart, Section, Series, Table

_HIDDEN = ("tier", "outer_hash")


def experiment_section(path: Path) -> Section:
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
    one = experiment(path.stem, TIERS[rows[0]["tier"]]())
    failed = len(rows) - len(finished(rows))
    runs = f"{len(rows)} of {len(one.runs)} runs" + (f", of which {failed} failed" if failed else "")
    measured, verdict = one.finding(rows) if finished(rows) else ("", "")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _HIDDEN]
    return Section(
        title=one.name,
        notes=[
            f"The paper ({one.source}): {one.claim}",
            *([f"Measured: {measured}."] if measured else []),
            f"{runs}.",
        ],
        facts={"verdict": verdict} if verdict else {},
        charts=[_chart(panel) for panel in one.panels(rows)],
        table=Table(columns=names, rows=[[_cell(row.get(name, "")) for name in names] for row in rows]),
    )


def _chart(panel: Panel) -> Chart:
    names, title = panel.names, panel.y_label.partition(",")[0]
    series = [
        Series(
            label=label,
            color=index,
            points=[(names.index(p.x) if isinstance(p.x, str) else p.x, p.mean, p.low, p.high) for p in points],
        )
        for index, (label, points) in enumerate(panel.curves.items())
    ]
    return Chart(
        title=title[:1].upper() + title[1:] + (f", {panel.title}" if panel.title and not panel.legend else ""),
        x=panel.x_label,
        y=panel.y_label,
        about="The paper's numbers." if panel.published else "Measured: means over the seeds, bars their range.",
        legend=panel.legend,
        series=series,
        names=[name.replace("_", " ") for name in names],
        x_log=panel.x_log,
        is_history=False,
    )


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
