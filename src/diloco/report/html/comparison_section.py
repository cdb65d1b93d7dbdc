"""The section that compares runs: their curves in one figure, and a table of their settings and results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from diloco.report.figures.drawing import STYLES, binned_means, new_axes, viridis
from diloco.report.html.page import figures, heading, paragraph, table
from diloco.report.html.run_section import RunRecord, held_out_losses, tail_loss
from diloco.report.labels import differing_settings, labels, short, shown_names
from diloco.report.terminal.training import duration, megabytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LETTERS = 48
_Curve = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]


def comparison_section(runs: Sequence[RunRecord]) -> str:
    """The section of several runs."""
    names = short(labels([run.config.name for run in runs], [run.config for run in runs]))
    drawn = {"Training loss, the mean over the replicas": _figure("training loss", names, map(_training, runs))}
    held_out = list(map(_held_out, runs))
    if any(len(x) for x, _ in held_out):
        drawn["Held-out loss of the outer parameters"] = _figure("held-out loss", names, held_out)
    settings = differing_settings([run.config for run in runs])
    rows = [
        [run.config.name, *(str(values[index]) for values in settings.values()), *_results(run).values()]
        for index, run in enumerate(runs)
    ]
    columns = ["run", *shown_names(settings), *_results(runs[0])]
    about = "Settings in which the runs differ, and results; bytes are those that a replica sent."
    return "\n".join([heading(f"{len(runs)} runs"), figures(drawn), paragraph(about), table(columns, rows)])


def _figure(y_label: str, names: Sequence[str], curves: "Sequence[_Curve] | map[_Curve]") -> "Figure":
    figure, axes = new_axes("tokens", f"{y_label}, nats a token")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    for index, (name, (x, y)) in enumerate(zip(names, curves, strict=True)):
        shade = viridis(0.6 * index / max(1, len(names) - 1))
        axes.plot(
            x,
            y,
            color=shade,
            ls=STYLES[index % len(STYLES)],
            marker="o" if len(x) == 1 else "",
            label=name[:_MOST_LETTERS],
        )
    # A name is any text: a `$` in it would begin mathematics.
    for text in axes.legend(fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
    return figure


def _training(run: RunRecord) -> _Curve:
    """The mean over the replicas, up to the last step that all have taken."""
    replicas = list(run.metrics.values())
    shortest = min(replicas, key=len)
    tokens = np.array([step.tokens for step in shortest])
    losses = np.mean([[step.loss for step in steps[: len(shortest)]] for steps in replicas], axis=0)
    ends, means = binned_means(losses)
    return tokens[ends - 1], means


def _held_out(run: RunRecord) -> _Curve:
    losses = held_out_losses(run.metrics)
    tokens = {step.step: step.tokens for steps in run.metrics.values() for step in steps}
    curve = {float(tokens[step]): loss for step, loss in losses.items()}
    if run.summary is not None:
        curve[float(run.summary.num_tokens)] = run.summary.eval_loss
    return list(curve), list(curve.values())


def _results(run: RunRecord) -> dict[str, str]:
    summary, steps = run.summary, next(iter(run.metrics.values()))
    seconds = sum(step.step_seconds for step in steps)
    blocked = sum(step.blocked_seconds for step in steps)
    return {
        "tokens": f"{max(each[-1].tokens for each in run.metrics.values()):,}",
        "training loss": f"{np.mean([tail_loss(each) for each in run.metrics.values()]):.4f}",
        "held-out loss": f"{summary.eval_loss:.4f}" if summary else "not finished",
        "bits per byte": f"{summary.eval_bits_per_byte:.4f}" if summary else "",
        "compute utilization": f"{1 - blocked / seconds:.1%}",
        "sent": megabytes(sum(step.bytes_sent for step in steps)),
        "time": duration(seconds),
    }
