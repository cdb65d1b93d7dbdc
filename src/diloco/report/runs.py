"""The facts and the curves of runs, finished or not: for the live page, the report and the terminal alike.

Losses and utilization are means over the replicas; times and bytes are those of the first replica on this machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate

import numpy as np

from diloco.outer.rules import outer_rule, spelling_of
from diloco.report.page import BLACK, Chart, Lane, Points, Section, Series, Table
from diloco.report.setup import CommandOf, comparison_headline, do_texts_differ, headline, samples, setup
from diloco.report.text import (
    Label,
    Setting,
    cell,
    differing_settings,
    duration,
    factor,
    megabytes,
    short,
    shown_names,
)
from diloco.training.config.config import TrainConfig
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.records.summary import Summary
from diloco.training.records.tail import LOSS_MEANING, Bin, ReplicaSteps, RunTail

LOSS, UTILIZATION = "training loss", "compute utilization"
_MEANINGS = {LOSS: LOSS_MEANING, UTILIZATION: "mean of all steps"}
"""The definitions of results, which are named where they are shown."""
_MOST_FLIGHTS = 8
_MOST_RATES = 32
_MOST_LENGTHS, _MOST_SPREAD = 10, 30
"""Ratios of the runs' lengths, and of their rates of sending, up to which linear axes show all of them."""
_MOST_OPEN = 4
"""Runs up to which the page unfolds the section of each."""
_MOST_TIMELINES = 8
"""Replicas whose sends and merges are drawn."""
_TOKENS = "tokens of all replicas"
NATS = "nats per token"
_RATE = "Mbit/s"


def with_meaning(name: str, text: str) -> str:
    """A result, or its name, with its definition."""
    return ", ".join(filter(None, (text, _MEANINGS.get(name))))


def run_facts(run: RunTail) -> dict[str, str]:
    """Progress, results and settings of a run, by name; what is not known yet is left out."""
    if run.last is None or run.config is None:
        return {}
    (replica, first), *_ = run.replicas.items()
    last, config = run.last, run.config
    step = f"{last.step:,} of {config.num_steps:,}"
    facts = {
        "step": step if config.rendezvous is None else f"{last.step:,}, {run.part:.1%} of the run",
        "ETA": duration(run.eta_seconds) if run.eta_seconds is not None and run.standing == "running" else "",
        LOSS: _text(LOSS, run.loss),
        **(_facts_so_far(run, config) if run.summary is None else summary_facts(run.summary)),
        "tokens/s": _text("tokens/s", run.tokens_per_second),
        f"blocked in replica {replica}": f"{first.blocked_seconds:.1f} s of {first.seconds:.0f} s",
        "merged per replica": megabytes(first.bytes_received) if first.bytes_received else "",
        "in flight": _in_flight_text(run.in_flight()),
        "method": config.method,
    }
    if config.method != "data_parallel":
        diloco = config.diloco
        facts |= {
            "H": str(diloco.sync_every),
            "τ": ", ".join(map(str, diloco.overlaps)),
            "merge": diloco.merge_rule,
        }
        facts |= {"wire": str(diloco.wire), "outer": spelling_of(outer_rule(diloco.outer_rule))}
    return {name: value for name, value in facts.items() if value}


def summary_facts(summary: Summary) -> dict[str, str]:
    """The results of a run that is over, by name."""
    is_baseline = summary.method == "data_parallel"
    data_parallel_bytes = 0 if is_baseline else summary.data_parallel_bytes_per_replica
    facts = _formatted(
        {
            LOSS: summary.training_loss,
            "held-out loss": summary.eval_loss,
            "bits per byte": summary.eval_bits_per_byte,
            "tokens": summary.num_tokens,
            "tokens/s": summary.tokens_per_second or None,
            UTILIZATION: summary.compute_utilization,
            "time": summary.wall_seconds,
            "MFU": summary.model_flops_utilization,
            "memory": summary.peak_memory_bytes or None,
            "sent per replica": summary.bytes_sent_per_replica or None,
            _DATA_PARALLEL: data_parallel_bytes or None,
        }
    )
    if "tokens/s" in facts and summary.replica_tokens_per_second is not None:
        facts["tokens/s"] += f" of all replicas, {summary.replica_tokens_per_second:,.0f} of this one"
    if summary.eval_standard_error is not None:
        facts["held-out loss"] += f" ± {summary.eval_standard_error:.4f}"
    trained, total = summary.num_trained_params, sum(part.tokens for part in summary.contributors.values())
    is_part = trained is not None and trained < summary.num_params
    shares = [f"{name} {part.tokens / total:.1%}" for name, part in summary.contributors.items()]
    return facts | {
        "contributors": ", ".join(shares),
        "replicas": str(summary.num_replicas),
        "parameters": f"{summary.num_params:,}" + (f", of which {trained:,} were trained" if is_part else ""),
        "outer hash": summary.outer_hash[:16] + _of_entry(summary),
    }


def _of_entry(summary: Summary) -> str:
    """The place of the outer parameters in the log; empty for those of the run's last entry."""
    return f", of entry {summary.entry}: the run was not closed" if summary.closed is False else ""


def _facts_so_far(run: RunTail, config: TrainConfig) -> dict[str, str]:
    """The numbers of a run that has begun, as they are shown."""
    first, last = run.first, run.last
    assert last is not None, "the run has begun"
    is_baseline = config.method == "data_parallel"
    data_parallel_bytes = 0 if is_baseline else _data_parallel_step_bytes(run, config) * first.num_steps
    facts = _formatted(
        {
            "held-out loss": run.eval_loss,
            "tokens": last.tokens,
            "tokens/s": run.tokens_per_second,
            UTILIZATION: run.compute_utilization,
            "time": first.seconds,
            "MFU": last.model_flops_utilization,
            "memory": last.peak_memory_bytes or None,
            "sent per replica": first.bytes_sent or None,
            _DATA_PARALLEL: data_parallel_bytes or None,
        }
    )
    return facts | {"replicas": str(_num_replicas(run, config) or "come and go")}


def _formatted(results: Mapping[str, float | None]) -> dict[str, str]:
    """The results of a run, in words, as far as they are known."""
    facts = {name: _FORMATS[name](value) for name, value in results.items() if value is not None}
    sent, data_parallel = results["sent per replica"], results[_DATA_PARALLEL]
    if sent and data_parallel:
        facts[_DATA_PARALLEL] += f", {factor(data_parallel / sent)}× as much"
    return facts


_DATA_PARALLEL = "Data-Parallel"
_FORMATS: dict[str, Callable[[float], str]] = {
    LOSS: "{:.4f}".format,
    "held-out loss": "{:.4f}".format,
    "bits per byte": "{:.4f}".format,
    "tokens": "{:,}".format,
    "tokens/s": "{:,.0f}".format,
    UTILIZATION: "{:.1%}".format,
    "time": duration,
    "MFU": "{:.1%}".format,
    "memory": megabytes,
    "sent per replica": megabytes,
    _DATA_PARALLEL: lambda num_bytes: f"would send {megabytes(num_bytes)} in FP32",
}


def _num_replicas(run: RunTail, config: TrainConfig) -> int | None:
    """M; with a rendezvous, the replicas that have contributed, which the summary alone knows."""
    if run.summary is not None:
        return run.summary.num_replicas
    return config.num_replicas if config.rendezvous is None else None


def _data_parallel_step_bytes(run: RunTail, config: TrainConfig) -> float:
    """Bytes that a replica would send at each step as a Data-Parallel one, as far as M is known."""
    summary = run.summary
    num_params = (summary.num_trained_params or summary.num_params) if summary else config.model.num_trained_params
    return ring_all_reduce_bytes(num_params, _num_replicas(run, config) or 1)


def _in_flight_text(flights: Mapping[int, Mapping[int, int]]) -> str:
    """The fragments under way, such as `fragment 2 of replicas 0 1 since step 58`."""
    replicas: dict[tuple[int, int], list[int]] = {}
    for replica, sent in flights.items():
        for fragment, step in sent.items():
            replicas.setdefault((step, fragment), []).append(replica)
    parts = [
        f"fragment {fragment} of replica{'s' * (len(senders) > 1)} {' '.join(map(str, senders[:_MOST_FLIGHTS]))}"
        f"{' …' * (len(senders) > _MOST_FLIGHTS)} since step {step:,}"
        for (step, fragment), senders in sorted(replicas.items())
    ]
    return "; ".join(parts[:_MOST_FLIGHTS]) + " …" * (len(parts) > _MOST_FLIGHTS)


def run_sections(
    runs: Sequence[RunTail],
    labels: Sequence[Label],
    *,
    with_charts: bool = True,
    command_of: CommandOf = lambda _: "",
) -> list[Section]:
    """The comparison of several runs, and a section for each run.

    Args:
        runs: the runs.
        labels: their names.
        with_charts: make all that a page shows, and not only what a terminal does.
        command_of: tells the command line of a run.
    """
    compared = [_comparison(runs, labels, with_charts=with_charts)] if len(runs) > 1 else []
    sections = compared + [
        Section(
            title=str(label),
            color=index if compared else BLACK,
            standing=run.standing,
            eta=facts.get("ETA", ""),
            part=run.part,
            headline=headline(run),
            notes=_notes(run),
            facts={name: with_meaning(name, value) for name, value in facts.items()},
            main=_MAIN if run.summary is not None else ["step", *_MAIN],
            setup=setup(run, command_of) if with_charts else {},
            samples=list(samples(run.directory)) if with_charts else (),
            charts=list(_run_charts(run)) if with_charts else (),
            is_open=len(runs) <= _MOST_OPEN,
        )
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        for facts in (run_facts(run),)
    ]
    _fit_axes([chart for section in sections for chart in section.charts], [run for run in runs if run.last])
    return sections


def _fit_axes(charts: Sequence[Chart], runs: Sequence[RunTail]) -> None:
    """Make the axes logarithmic on which a run would be a smear, or a flat curve, beside another one."""
    lengths = [run.last.tokens for run in runs if run.last is not None]
    rates = [run.first.bytes_sent / run.first.seconds for run in runs if run.first.bytes_sent]
    are_lengths_apart = max(lengths, default=0) > _MOST_LENGTHS * min(lengths, default=0)
    are_rates_apart = max(rates, default=0) > _MOST_SPREAD * min(rates, default=0)
    for chart in charts:
        if chart.x == _TOKENS and are_lengths_apart:
            chart.x, chart.x_log = f"{_TOKENS}, logarithmic", True
        if chart.y == _RATE and are_rates_apart:
            chart.y, chart.y_log, chart.from_zero = f"{_RATE}, logarithmic", True, False
            for one in chart.series:
                one.points = [point for point in one.points if point[1] > 0]


_MAIN = ("held-out loss", LOSS, "bits per byte", "sent per replica", UTILIZATION, "tokens/s", "time")
"""Facts that a page shows large."""


def _notes(run: RunTail) -> list[str]:
    absent = [str(m) for m in range(run.config.num_local_replicas if run.config else 0) if m not in run.replicas]
    ending = [run.ending[:1].upper() + run.ending[1:]] if run.ending else []
    if not absent or run.last is None:
        return ending
    return [*ending, f"No metrics of replica{'s' * (len(absent) > 1)} {', '.join(absent)} are on this machine."]


_COMPARED = {"held-out loss": "held-out loss", "sent per replica": "sent"}
"""Facts in which runs are compared before the settings in which they differ: their names in the table."""
_COMPARED_AFTER = {
    **{LOSS: "loss, last 5 %", UTILIZATION: "utilization", "tokens/s": "tokens/s", "time": "time"},
    **{"step": "step", "ETA": "ETA"},
}
"""Facts after the settings."""


def _comparison(runs: Sequence[RunTail], labels: Sequence[Label], *, with_charts: bool) -> Section:
    """The results of several runs, the settings in which they differ, and their curves beside each other."""
    names, started = short(labels), [index for index, run in enumerate(runs) if run.last is not None]
    charts: list[Chart] = []
    if with_charts and started:
        named = [(names[i], i, runs[i]) for i in started]
        charts = [*loss_charts(named), _bytes_chart(named), *_rate_charts(named)]
    return Section(
        title=f"{len(runs)} runs",
        headline=comparison_headline([label.name for label in labels], runs),
        charts=[*_drawn(charts)],
        table=_compared(runs, labels),
    )


def _compared(runs: Sequence[RunTail], labels: Sequence[Label]) -> Table:
    """A row for each run: its results, and the settings in which it differs from the others."""
    facts = [run_facts(run) for run in runs]
    settings = differing_settings(runs)
    columns = {"run": [label.name for label in labels], "state": [run.standing for run in runs]}
    compared = _COMPARED | ({"bits per byte": "bits per byte"} if do_texts_differ(runs) else {})
    columns |= {short_name: [one.get(name, "") for one in facts] for name, short_name in compared.items()}
    settings = {name: values for name, values in settings.items() if not _follows(name, values, settings)}
    for name, values in zip(shown_names(settings), settings.values(), strict=True):
        columns[name] = list(map(cell, values))
    columns |= {short_name: [one.get(name, "") for one in facts] for name, short_name in _COMPARED_AFTER.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    both = (_COMPARED | _COMPARED_AFTER).items()
    return Table(
        columns=list(columns),
        rows=list(zip(*columns.values(), strict=True)),
        colors=[*range(len(runs))],
        meanings={short_name: with_meaning(name, name) for name, short_name in both if short_name != name},
    )


def _follows(name: str, values: Sequence[Setting], settings: Mapping[str, Sequence[Setting]]) -> bool:
    """True for a setting that one method has and another has not, and that is the same where it is."""
    return "method" in settings and name.startswith("diloco.") and len({*values} - {"None"}) == 1


def _run_charts(run: RunTail) -> Iterator[Chart]:
    """The charts of one run: loss, bytes, rates, and by fragment what its outer steps were like."""
    if run.last is None or run.config is None:
        return
    named = [("", 0, run)]
    yield from _drawn([*loss_charts(named), _bytes_chart(named), *_rate_charts(named)])
    if any(steps.first_merges for steps in run.replicas.values()):
        yield _timeline(run, run.config.diloco.sync_every)
    bins = run.first.outer_bins

    def means(name: str) -> dict[int, Points]:
        return {
            p: [
                _point(one.last, getattr(one, name) / number)
                for one in bins[p]
                if (number := getattr(one, f"num_{name}s"))
            ]
            for p in bins
        }

    if any((norms := means("norm")).values()):
        about = "Size of a round's change, by fragment. It falls as training settles; a jump is a warning."
        yield _by_fragment("Norm of the mean outer gradient", "norm", norms, about, from_zero=True)
    if any((cosines := means("cosine")).values()):
        about = "Agreement of the replicas: 1 if their changes are the same, 0 if they have nothing in common."
        yield _by_fragment("Cosine between the replicas' outer gradients", "cosine", cosines, about)
    if any((cosines := means("successive_cosine")).values()):
        about = "How far a round's change goes on with the one before: the more, the more outer momentum adds up."
        yield _by_fragment("Cosine of successive mean outer gradients, ρ", "cosine", cosines, about)
    if any((gains := means("gain")).values()):
        about = "The part of an outer step along its mean outer gradient, in that gradient: η (1 + μ/(1 − μρ))."
        yield _by_fragment("Gain of the outer step", "gain", gains, about, from_zero=True)


def _drawn(charts: Sequence[Chart]) -> Iterator[Chart]:
    """The charts in which something is seen: a single point is a fact, and no curve."""
    yield from (chart for chart in charts if any(len(one.points) > 1 for one in chart.series))


_Named = tuple[str, int, RunTail]
"""A run with its name, empty for one that stands alone, and the number of its colour."""


def loss_charts(runs: Sequence[_Named]) -> list[Chart]:
    """Training and held-out loss of runs over their tokens."""
    held_out = _means(runs, _held_out, "held-out loss", lambda _: None, lambda run: run.eval_loss)
    for (_, _, run), mean in zip(runs, held_out[-len(runs) :], strict=True):
        if run.summary is not None:  # of the whole held-out text, where each replica evaluates a share
            before = [point for point in mean.points if point[0] < run.summary.num_tokens]
            mean.points = [*before, _point(run.summary.num_tokens, run.summary.eval_loss)]
    return [
        Chart(
            title="Training loss",
            x=_TOKENS,
            y=NATS,
            series=_means(runs, _loss, LOSS, lambda steps: steps.loss, lambda run: run.loss),
            about="Error in predicting the text that is trained on; lower is better. The number is the "
            f"{_MEANINGS[LOSS]}.",
        ),
        Chart(
            title="Held-out loss",
            x=_TOKENS,
            y=NATS,
            series=held_out,
            about="The same error of the shared outer parameters on text that is not trained on; lower is better.",
        ),
    ]


def _means(
    runs: Sequence[_Named],
    points: Callable[[Sequence[Bin]], Points],
    name_of_value: str,
    replica_value: Callable[[ReplicaSteps], float | None],
    run_value: Callable[[RunTail], float | None],
) -> list[Series]:
    """Thin curves of the replicas, where a run has several; after them, the mean curve of each run."""
    thin, means = [], []
    for name, color, run in runs:
        is_alone, own, label = len(runs) == 1, color, name or f"replica {next(iter(run.replicas))}"
        curves = [points(steps.bins) for steps in run.replicas.values()]
        if len(curves) > 1:
            for index, (m, steps) in enumerate(run.replicas.items()):
                replica, shade = (f"replica {m}", index) if is_alone else ("", color)
                value = _text(name_of_value, replica_value(steps))
                thin.append(Series(label=replica, color=shade, points=curves[index], thin=True, value=value))
            own, label = (BLACK, "mean") if is_alone else (color, name)
        value = _text(name_of_value, run_value(run))
        means.append(Series(label=label, color=own, points=_mean(curves), value=value))
    return thin + means


def _text(name: str, value: float | None) -> str:
    """A number as the facts show it; empty if it is not known."""
    return "" if value is None else _FORMATS[name](value)


def _rate_charts(runs: Sequence[_Named]) -> list[Chart]:
    """The charts of speed, compute utilization, and bytes per time."""

    def chart(title: str, y: str, points: Callable[[Sequence[Bin]], Points], about: str) -> Chart:
        """A chart of the runs, or of the replicas of a run that stands alone."""
        curves = [(name, color, run.first) for name, color, run in runs]
        if len(runs) == 1:
            curves = [(f"replica {m}", i, steps) for i, (m, steps) in enumerate(runs[0][2].replicas.items())]
        series = [Series(label=label, color=color, points=points(steps.bins)) for label, color, steps in curves]
        return Chart(title=title, x=_TOKENS, y=y, series=series, about=about, from_zero=True)

    utilizations = _means(
        *(runs, _utilization, UTILIZATION),
        *(lambda steps: steps.compute_utilization, lambda run: run.compute_utilization),
    )
    speeds = [
        Series(
            label=name or "all replicas",
            color=color,
            points=_speed(run.first.bins),
            value=_text("tokens/s", run.tokens_per_second),
        )
        for name, color, run in runs
    ]
    charts = [
        Chart(
            title="Speed of all replicas",
            x=_TOKENS,
            y="tokens/s",
            series=speeds,
            about="Tokens of all replicas, at the pace of the first one; the number is that of all steps.",
            from_zero=True,
        ),
        Chart(
            title="Compute utilization",
            x=_TOKENS,
            y="share of time",
            series=utilizations,
            about="Share of time in which training did not wait for other replicas; the number is the "
            f"{_MEANINGS[UTILIZATION]}.",
            from_zero=True,
        ),
    ]
    if any(run.first.bytes_sent for _, _, run in runs):
        about = "The outer gradients that a replica uploads, on average over a part of the run."
        charts.append(chart("Sent by a replica", _RATE, _sent, about))
        about = "The others' outer gradients when they are merged, on average over a part of the run."
        charts.append(chart("Merged by a replica", _RATE, _received, about))
    return charts


def _bytes_chart(runs: Sequence[_Named]) -> Chart:
    """A chart of the bytes that runs have sent; beside a run that stands alone, those of Data-Parallel."""
    series, about = [], "Sum over the run so far."
    for name, color, run in runs:
        sent = zip(run.first.bins, accumulate(one.bytes_sent for one in run.first.bins), strict=True)
        points = [_point(one.last, so_far) for one, so_far in sent if so_far]
        total = megabytes(points[-1][1]) if points else ""
        series.append(Series(label=name or _method(run), color=color, points=points, value=total))
    (_, _, run), *others = runs
    each = 0.0 if run.config is None or others else _data_parallel_step_bytes(run, run.config)
    if each and _method(run) != "data_parallel":
        steps = zip(run.first.bins, accumulate(one.num_steps for one in run.first.bins), strict=True)
        points = [_point(one.last, each * count) for one, count in steps]
        total = megabytes(points[-1][1]) if points else ""
        series.append(Series(label="Data-Parallel, FP32", color=1, points=points, value=total))
        about = "Sum over the run so far, beside what Data-Parallel would have sent by then."
    return Chart(
        title="Bytes sent by a replica", x=_TOKENS, y="bytes, logarithmic", series=series, about=about, y_log=True
    )


def _method(run: RunTail) -> str:
    return "" if run.config is None else run.config.method


def _timeline(run: RunTail, sync_every: int) -> Chart:
    """A lane for each fragment and replica, with bars from sending to merging."""
    merges = {m: steps.first_merges for m, steps in list(run.replicas.items())[:_MOST_TIMELINES]}
    every = [merge for merged in merges.values() for merge in merged]
    end = min((merge.sent_step for merge in every), default=0) + 2 * sync_every
    lanes = []
    for fragment in sorted({merge.fragment for merge in every}):
        for index, merged in enumerate(merges.values()):
            bars = [
                (one.sent_step, one.merged_step)
                for one in merged
                if one.fragment == fragment and one.sent_step <= end
            ]
            label = "" if index else f"fragment {fragment}"
            lanes.append(Lane(label=label, color=index, bars=bars, dots=[stop for _, stop in bars]))
    return Chart(
        title="Sends and merges in the first rounds",
        x="step",
        about="A bar begins where a fragment was sent, and its dot is where it was merged; training goes on.",
        series=[Series(label=f"replica {m}", color=index, points=[]) for index, m in enumerate(merges)],
        lanes=lanes,
    )


def _by_fragment(
    title: str, y: str, points: Mapping[int, Points], about: str, *, from_zero: bool = False
) -> Chart:
    series = [
        Series(label=f"fragment {fragment}", color=index, points=curve)
        for index, (fragment, curve) in enumerate(points.items())
    ]
    return Chart(title=title, x="step", y=y, series=series, about=about, from_zero=from_zero)


def _point(x: float, y: float) -> tuple[float, float]:
    return float(f"{x:.8g}"), float(f"{y:.5g}")


def _mean(curves: Sequence[Points]) -> list[tuple[float, float]]:
    """The mean curve at the points of the shortest one."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    x = np.array(min(curves, key=lambda curve: curve[-1][0]))[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        y = np.mean([np.interp(x, *np.array(curve).T) for curve in curves], axis=0)
    return [_point(*point) for point in zip(x, y, strict=True)]


def _loss(bins: Sequence[Bin]) -> Points:
    return [_point(one.last, one.loss / one.num_steps) for one in bins]


def _held_out(bins: Sequence[Bin]) -> Points:
    return [_point(one.last, one.eval_loss / one.num_evals) for one in bins if one.num_evals]


def _rate(value: Callable[[Bin], float], seconds: str = "seconds") -> Callable[[Sequence[Bin]], Points]:
    """A rate over longer parts of the run, since a single step may send all or nothing."""

    def points(bins: Sequence[Bin]) -> Points:
        parts = (reduce(Bin.plus, part) for part in _parts(bins, _MOST_RATES))
        return [_point(one.last, value(one) / getattr(one, seconds)) for one in parts if getattr(one, seconds)]

    return points


def _parts(bins: Sequence[Bin], most: int) -> list[Sequence[Bin]]:
    """Equal parts; bins that do not fill a last one are left out, as its rate would say little."""
    size = max(1, -(-len(bins) // most))
    return [bins[end - size : end] for end in range(size, len(bins) + 1, size)]


_speed = _rate(lambda one: one.new_tokens, "timed_seconds")
_utilization = _rate(lambda one: one.seconds - one.blocked_seconds)
_sent = _rate(lambda one: 8e-6 * one.bytes_sent)
_received = _rate(lambda one: 8e-6 * one.bytes_received)
