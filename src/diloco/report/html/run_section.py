"""The section of a run: its results, its curves, and what it sent and when, beside Data-Parallel."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diloco.errors import UserError
from diloco.report.figures.drawing import MARKERS, STYLES, binned_means, new_axes, viridis
from diloco.report.html.page import facts, figures, heading, paragraph
from diloco.report.terminal.training import megabytes
from diloco.schema import read_json
from diloco.training.config.config import TrainConfig
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.records.metrics import OuterStepMetrics, StepMetrics, read_metrics
from diloco.training.records.runs import read_config
from diloco.training.records.summary import SUMMARY_FILE, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Metrics = list[StepMetrics]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The files of a run, finished or not."""

    config: TrainConfig
    summary: Summary | None
    """The content of `summary.json`; None before the end."""
    metrics: dict[int, _Metrics]
    """The steps of each replica that has taken one on this machine; at least one has."""


def read_run(directory: Path) -> RunRecord:
    """Read a run.

    Raises:
        UserError: if the directory holds no run, or one that has taken no step.
        FileError: if one of its files is damaged.
    """
    config = read_config(directory)
    metrics = {replica: read_metrics(directory, replica) for replica in range(config.num_local_replicas)}
    metrics = {replica: steps for replica, steps in metrics.items() if steps}
    if not metrics:
        raise UserError(f"{directory} has no metrics of any step yet")
    summary_file = directory / SUMMARY_FILE
    summary = read_json(summary_file, Summary, most_bytes=1 << 20) if summary_file.exists() else None
    return RunRecord(config=config, summary=summary, metrics=metrics)


def run_section(run: RunRecord) -> str:
    """The section of a run."""
    config, summary, metrics = run.config, run.summary, run.metrics
    parts = [
        heading(f"Run {config.name}"),
        facts(_facts(config, summary, metrics)),
        figures(_figures(config, summary, metrics)),
    ]
    absent = [str(replica) for replica in range(config.num_local_replicas) if replica not in metrics]
    if absent:
        parts.insert(1, paragraph(f"The metrics of replica {', '.join(absent)} are on another machine."))
    if not summary:
        parts.insert(1, paragraph(f"The run is not finished: step {_progress(config, metrics)}."))
    return "\n".join(parts)


def _progress(config: TrainConfig, metrics: dict[int, _Metrics]) -> str:
    """The last step, and all steps; with a rendezvous, where replicas differ in steps, the part of the run."""
    last = max((steps[-1] for steps in metrics.values()), key=lambda step: step.step)
    if config.rendezvous is None:
        return f"{last.step:,} of {config.num_steps:,}"
    return f"{last.step:,}, {last.tokens / config.num_tokens:.1%} of the run"


def _num_replicas(config: TrainConfig, summary: Summary | None) -> int | None:
    """M; with a rendezvous, the replicas that have contributed, which the summary alone knows."""
    if summary is not None:
        return summary.num_replicas
    return config.num_replicas if config.rendezvous is None else None


def _facts(config: TrainConfig, summary: Summary | None, metrics: dict[int, _Metrics]) -> dict[str, str]:
    first = next(iter(metrics.values()))
    seconds = sum(step.step_seconds for step in first)
    blocked = sum(step.blocked_seconds for step in first)
    sent = sum(step.bytes_sent for step in first)
    facts_of_run = {
        "method": config.method,
        "replicas": str(_num_replicas(config, summary) or "come and go"),
        "steps": _progress(config, metrics),
        "training loss, last 5 %": f"{np.mean([tail_loss(steps) for steps in metrics.values()]):.4f}",
        "compute utilization": f"{1 - blocked / seconds:.1%}",
        "blocked": f"{blocked:.1f} s of {seconds:.0f} s",
        "sent per replica": megabytes(sent),
    }
    if summary:
        data_parallel = summary.data_parallel_bytes_per_replica
        fewer = f", {data_parallel / sent:,.0f}× as much" if sent else ""
        error = f" ± {summary.eval_standard_error:.4f}" if summary.eval_standard_error else ""
        facts_of_run |= {
            "parameters": f"{summary.num_params:,}",
            "tokens": f"{summary.num_tokens:,}",
            "held-out loss": f"{summary.eval_loss:.4f}{error}",
            "bits per byte": f"{summary.eval_bits_per_byte:.4f}",
            "Data-Parallel would send": megabytes(data_parallel) + fewer,
            "outer hash": summary.outer_hash[:16],
        }
    if config.method != "data_parallel":
        diloco = config.diloco
        facts_of_run |= {"H": str(diloco.sync_every), "τ": str(diloco.overlap_steps), "α": f"{diloco.mixing:g}"}
        facts_of_run |= {"wire": str(diloco.wire), "η": f"{diloco.outer_learning_rate:g}"}
    return facts_of_run


def tail_loss(steps: _Metrics) -> float:
    """The mean loss of the last 5 % of the steps."""
    return float(np.mean([step.loss for step in steps[-max(1, len(steps) // 20) :]]))


def _figures(config: TrainConfig, summary: Summary | None, metrics: dict[int, _Metrics]) -> "dict[str, Figure]":
    drawn = {
        "Training loss of each replica, and their mean": _loss(metrics),
        "Compute utilization, and the share of time in which training waited": _utilization(metrics),
        "Bytes sent by a replica, beside what Data-Parallel would have sent": _bytes(config, summary, metrics),
    }
    held_out = held_out_losses(metrics)
    if held_out:
        figure, axes = new_axes("step", "held-out loss, nats a token")
        axes.plot(list(held_out), list(held_out.values()), color=viridis(0.0), marker="o", ms=3)
        drawn["Held-out loss of the outer parameters"] = figure
    outer_steps = [outer_step for steps in metrics.values() for outer_step in _merges(steps)]
    if outer_steps:
        drawn["What was sent, and merged, in the first rounds"] = _timeline(config, metrics)
        for name, label in (("outer_gradient_norm", "norm of the outer gradient"), ("cosine", "cosine")):
            if any(getattr(merge.outer, name) is not None for merge in outer_steps):
                caption = {"cosine": "Cosine between the replicas' outer gradients, by fragment"}
                drawn[caption.get(name, "Norm of the mean outer gradient, by fragment")] = _by_fragment(
                    _merges(next(iter(metrics.values()))), name, label
                )
    return drawn


def held_out_losses(metrics: dict[int, _Metrics]) -> dict[int, float]:
    """The held-out loss by step: the mean over the replicas, each of which evaluates a share of the text."""
    shares: dict[int, list[float]] = {}
    for steps in metrics.values():
        for step in steps:
            if step.eval_loss is not None:
                shares.setdefault(step.step, []).append(step.eval_loss)
    return {step: float(np.mean(losses)) for step, losses in sorted(shares.items())}


class _Merge(NamedTuple):
    """An outer step, and the inner step after which it was merged."""

    outer: OuterStepMetrics
    merged_step: int


def _merges(steps: _Metrics) -> list[_Merge]:
    return [_Merge(outer, step.step) for step in steps for outer in step.outer_steps]


def _loss(metrics: dict[int, _Metrics]) -> "Figure":
    figure, axes = new_axes("step", "training loss, nats a token")
    shortest = min(map(len, metrics.values()))
    curves = {
        replica: binned_means([step.loss for step in steps[:shortest]]) for replica, steps in metrics.items()
    }
    for index, (replica, (x, y)) in enumerate(curves.items()):
        shade = viridis(0.6 * (index + 1) / (len(curves) + 1))
        axes.plot(x, y, color=shade, lw=0.8, ls=STYLES[index % len(STYLES)], label=f"replica {replica}")
    x = next(iter(curves.values()))[0]
    axes.plot(x, np.mean([y for _, y in curves.values()], axis=0), color="black", lw=1.6, label="mean")
    axes.legend(fontsize=8, frameon=False)
    return figure


def _utilization(metrics: dict[int, _Metrics]) -> "Figure":
    figure, axes = new_axes("step", "share of time")
    x, seconds = binned_means(_mean(metrics, "step_seconds"))
    _, blocked = binned_means(_mean(metrics, "blocked_seconds"))
    axes.plot(x, 1 - blocked / seconds, color=viridis(0.0), label="compute utilization")
    axes.plot(x, blocked / seconds, color=viridis(0.5), ls="--", label="blocked")
    axes.set_ylim(-0.02, 1.05)
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def _mean(metrics: dict[int, _Metrics], name: str) -> list[float]:
    """The mean over the replicas, for each step that all have taken."""
    by_replica = ([float(getattr(step, name)) for step in steps] for steps in metrics.values())
    return [sum(values) / len(values) for values in zip(*by_replica, strict=False)]


def _bytes(config: TrainConfig, summary: Summary | None, metrics: dict[int, _Metrics]) -> "Figure":
    figure, axes = new_axes("step", "bytes sent, in all")
    steps = next(iter(metrics.values()))
    x = [step.step for step in steps]
    num_params = (summary.num_trained_params or summary.num_params) if summary else config.model.num_trained_params
    each = ring_all_reduce_bytes(num_params, _num_replicas(config, summary) or 1)
    sent = np.cumsum([float(step.bytes_sent) for step in steps])
    axes.plot(x, sent, color=viridis(0.0), label=config.method)
    if config.method != "data_parallel" and each:
        axes.plot(x, [each * step for step in x], color=viridis(0.5), ls="--", label="Data-Parallel, FP32")
    if sent[-1]:  # one replica sends nothing
        axes.set_yscale("log", nonpositive="mask")
    axes.legend(fontsize=8, frameon=False)
    return figure


def _timeline(config: TrainConfig, metrics: dict[int, _Metrics]) -> "Figure":
    """A lane for each fragment; in it, for each replica, bars from the step of sending to that of merging."""
    merges = {replica: _merges(steps) for replica, steps in metrics.items()}
    first = min(merge.outer.sent_step for merged in merges.values() for merge in merged)
    end = first + 2 * config.diloco.sync_every
    fragments = sorted({merge.outer.fragment for merged in merges.values() for merge in merged})
    figure, axes = new_axes("step", "fragment")
    height = 0.8 / len(merges)
    for index, (replica, merged) in enumerate(merges.items()):
        shade = viridis(0.6 * index / max(1, len(merges) - 1))
        shown = [merge for merge in merged if merge.outer.sent_step <= end]
        for outer, merged_step in shown:
            lane = fragments.index(outer.fragment) - 0.4 + (index + 0.5) * height
            width = merged_step - outer.sent_step
            axes.barh(lane, max(width, 0.3), left=outer.sent_step, height=0.9 * height, color=shade)
        marker = MARKERS[index % len(MARKERS)]
        lanes = [fragments.index(merge.outer.fragment) - 0.4 + (index + 0.5) * height for merge in shown]
        axes.plot(
            [merge.merged_step for merge in shown], lanes, marker, color=shade, ms=3, label=f"replica {replica}"
        )
    axes.set_yticks(range(len(fragments)), [str(fragment) for fragment in fragments])
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


def _by_fragment(merges: list[_Merge], name: str, label: str) -> "Figure":
    figure, axes = new_axes("step", label)
    fragments = sorted({merge.outer.fragment for merge in merges})
    for index, fragment in enumerate(fragments):
        points = [
            (outer.sent_step, value)
            for outer, _ in merges
            if outer.fragment == fragment and (value := getattr(outer, name)) is not None
        ]
        shade = viridis(0.6 * index / max(1, len(fragments) - 1))
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, color=shade, ls=STYLES[index % len(STYLES)], lw=1, label=f"fragment {fragment}")
    axes.legend(fontsize=8, frameon=False)
    return figure
