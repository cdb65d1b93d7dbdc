"""A run in a terminal: its data and settings before it starts, its steps while it trains, and its results."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from diloco.auto import chosen, expected_excess
from diloco.data.prepare import PrepareProgress, ProgressCallback
from diloco.data.shards import read_index, total
from diloco.outer.nesterov import Nesterov
from diloco.outer.rules import rules_of
from diloco.report.setup import learning_rate_text
from diloco.report.text import duration, megabytes
from diloco.schema import converted
from diloco.training.config.config import TrainConfig
from diloco.training.config.resolve import Budget, auto_facts, text_facts
from diloco.training.prepare import epoch_tokens
from diloco.training.processes import process_name
from diloco.training.records.metrics import StepMetrics, metrics_file
from diloco.training.records.samples import Sample
from diloco.training.records.summary import Outcome, Summary
from diloco.training.records.tail import ReplicaSteps, ReplicaTail

if TYPE_CHECKING:
    from diloco.rendezvous.store_rendezvous import StoreRendezvous
    from diloco.training.config.forecast import Forecast

_SECONDS_BETWEEN_LINES = 10.0
_MOST_EPOCHS = 4
"""Passes over a text up to which they are worth almost as much as new text (arXiv 2305.16264)."""
_LINK_GBIT_S = 0.1
_WARMUP_LEFT_OUT = "a tenth of the steps left (at most 1000)"
"""The warm-up of a resume's new phase, before it is known from which step it goes on."""


@contextmanager
def preparation_progress(console: Console) -> Iterator[ProgressCallback]:
    """A callback for `prepare` that shows its progress: a line of a terminal, elsewhere one every 10 seconds."""
    pace, speed = _Pace(), _Speed()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("")

    def show(progress: PrepareProgress) -> None:
        """Update the line."""
        line = (
            f"{progress.stage}: {progress.num_documents:,} documents, {progress.num_bytes:,} bytes, "
            f"{progress.num_tokens:,} tokens{speed.of(progress)}"
        )
        if console.is_terminal:
            bar.start()
            bar.update(task, description=line)
        elif pace.is_time_for_a_line():
            console.print(line, highlight=False, soft_wrap=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


class _Speed:
    """The speed of a preparation since its first report, and the time that is left."""

    def __init__(self) -> None:
        self._first: tuple[float, PrepareProgress] | None = None

    def of(self, progress: PrepareProgress) -> str:
        """The words of a line's end; none in the first second."""
        if progress.stage != "packing":
            return ""
        now = time.monotonic()
        begun, first = self._first = self._first or (now, progress)
        if (seconds := now - begun) < 1:
            return ""
        words = f"  {(progress.num_bytes - first.num_bytes) / 1e6 / seconds:.1f} MB/s"
        if progress.fraction is None or first.fraction is None or progress.fraction <= first.fraction:
            return words
        left = seconds * (1 - progress.fraction) / (progress.fraction - first.fraction)
        return f"{words}  ETA {duration(left)}"


class _Pace:
    """The lines where there is no terminal: one every 10 seconds."""

    def __init__(self) -> None:
        self._last_line = time.monotonic()

    def is_time_for_a_line(self) -> bool:
        """True where the last one is that old; then the next one is as late again."""
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True


class TrainingProgress:
    """One replica's progress: two live lines in a terminal, elsewhere a line every 10 seconds.

    Args:
        config: the run's.
        console: to write to.
        rank: the process's number among all, which is named where there are several.
    """

    def __init__(self, config: TrainConfig, console: Console, *, rank: int = 0) -> None:
        self._config, self._console = config, console
        self._replica = 0 if config.rendezvous is not None else rank // config.processes_per_replica
        is_named = rank > 0 or config.num_local_replicas > 1
        self._name = f"{process_name(config.processes_per_replica, rank)}  " if is_named else ""
        self._bar = Progress(
            BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("{task.fields[eta]}"), expand=True
        )
        self._task = self._bar.add_task("train", total=config.num_steps, eta="")
        self._line = Text()
        self._view = Live(Group(self._line, self._bar), console=console)
        self._steps = ReplicaSteps()
        self._pace = _Pace()

    def started(
        self, step: int, rendezvous: "StoreRendezvous | None", *, is_resume: bool, longer: str = ""
    ) -> None:
        """Show the replica's place in the run that it has joined, and the step from which a resume goes on.

        Its progress goes on with the steps before that. `longer` is the flag that extends a run that is over.
        """
        if rendezvous is not None:
            self._joined(rendezvous)
        if is_resume:
            self._steps = ReplicaTail(metrics_file(self._config.directory, self._replica)).read()
            self._resumed(step, longer)

    def _joined(self, rendezvous: "StoreRendezvous") -> None:
        state, own = rendezvous.state, rendezvous.replica
        others = [state.members[each].name for each in state.active if each != own]
        beside = f"beside {', '.join(others)}" if others else "alone" if own else "the first of a new run"
        num_rounds = max(log.round for log in state.fragments)
        line = f"store {self._config.rendezvous}: replica {own}, {beside}; round {num_rounds}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _resumed(self, step: int, longer: str) -> None:
        anew = "no step was saved by every replica: starting over"
        if self._config.rendezvous is not None:
            anew = "no checkpoint was saved: starting from the run's outer parameters"
        line = f"going on from step {step}" if step else anew
        if self._config.rendezvous is None and step >= self._config.num_steps:
            line = f"{self._config.directory} is over at step {step}" + f"; to extend it: {longer}" * bool(longer)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, metrics: StepMetrics) -> None:
        """Show a step."""
        self._steps.add(metrics)
        if metrics.eval_loss is not None:
            shares = self._config.num_local_replicas > 1
            whose = f" of replica {self._replica}'s share of the text" if shares else ""
            line = f"step {metrics.step}  held-out loss {metrics.eval_loss:.4f}{whose}"
            self._console.print(line, highlight=False, soft_wrap=True)
        if self._console.is_terminal:
            self._view.start()
            self._line.plain = self._status(metrics, self._steps)
            completed = metrics.tokens / self._config.tokens_per_step  # steps of the global batch
            self._bar.update(self._task, completed=completed, eta=self._eta(metrics, self._steps))
        elif self._pace.is_time_for_a_line() or metrics.tokens >= self._config.num_tokens:
            line = f"{self._status(metrics, self._steps)}  {self._eta(metrics, self._steps)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live lines."""
        self._view.stop()

    def _status(self, metrics: StepMetrics, steps: ReplicaSteps) -> str:
        where = f"step {metrics.step}/{self._config.num_steps}"
        if self._config.rendezvous is not None:
            where = f"step {metrics.step}, {metrics.tokens / self._config.num_tokens:.1%} of the run"
        held_out = "" if steps.evaluated is None else f"held-out {steps.evaluated.eval_loss:.3f}  "
        return (
            f"{self._name}{where}  loss {steps.loss:.3f}  {held_out}{steps.tokens_per_second or 0:,.0f} tokens/s  "
            f"compute utilization {steps.compute_utilization:.1%}  sent {megabytes(steps.bytes_sent)}"
            + "".join(f"  {part}" for part in _of_gpu(metrics.model_flops_utilization, metrics.peak_memory_bytes))
        )

    def _eta(self, metrics: StepMetrics, steps: ReplicaSteps) -> str:
        seconds = steps.seconds_for(max(0, self._config.num_tokens - metrics.tokens))
        return "" if seconds is None else f"ETA {duration(seconds)}"


def print_outcome(config: TrainConfig, outcome: Outcome | None, console: Console, *, rank: int = 0) -> None:
    """Print the results, the run's directory, and samples; of another process than the first, what it has.

    Args:
        config: the run's.
        outcome: of the process's replica; None in any but its first process.
        console: to print to.
        rank: the process's number among all.
    """
    from diloco.report.runs import summary_facts, with_meaning  # with the charts, which no start needs

    facts = {} if outcome is None else summary_facts(converted(outcome.summary, Summary, source="the summary"))
    files = str(config.directory)
    if rank:
        files += ": this machine's metrics and checkpoints; replica 0 has written the model into its own"
    for name, value in {**facts, "files": files}.items():
        if value:
            console.print(f"{name:21}{with_meaning(name, value)}", highlight=False, markup=False, soft_wrap=True)
    if outcome is not None and outcome.samples:
        _print_samples(outcome.samples, console)
        _print_reach(config, converted(outcome.summary, Summary, source="the summary"), console)


def _print_samples(samples: Sequence[Sample], console: Console) -> None:
    console.print("\nThe model writes", highlight=False)
    for sample in samples:
        place = f"after {sample.prompt!r}" if sample.prompt else "at the beginning of a document"
        console.print(f"\n{place}:", style="dim", highlight=False, markup=False)
        console.print(Text.assemble((sample.prompt, "bold"), sample.text.rstrip()), soft_wrap=True)


def _print_reach(config: TrainConfig, summary: Summary, console: Console) -> None:
    from diloco.report.reach import reach  # with the tables of the scaling laws, which no start needs

    far = reach(config, num_tokens=summary.num_tokens, tokens_per_second=summary.tokens_per_second)
    if far is not None:
        table = Table(*far.table.columns, box=None, header_style="bold")
        for row in far.table.rows:
            table.add_row(*map(Text, row))
        console.print("", far.this, table, far.about, sep="\n", highlight=False, markup=False)


def _of_gpu(model_flops_utilization: float | None, peak_memory_bytes: int | None) -> list[str]:
    """A GPU's utilization and memory, as far as they are known."""
    mfu, peak = model_flops_utilization, peak_memory_bytes
    return ([] if mfu is None else [f"MFU {mfu:.1%}"]) + ([] if peak is None else [f"memory {megabytes(peak)}"])


def start_lines(config: TrainConfig, budget: Budget | None) -> Iterator[str]:
    """Lines about the text, the budget and the directory of a run.

    Args:
        config: resolved.
        budget: as it was asked for; None for a resume that goes on with its own.
    """
    assert config.data.prepared is not None, "the config is resolved"
    yield from _outer_line(config)
    index = read_index(config.data.prepared)
    tokens_an_epoch = epoch_tokens(config)
    yield f"data  {config.data.prepared}, digest {index.digest[:16]}"
    if index.held_out_by_position:
        share = index.settings.held_out_fraction
        yield f"      the last {share:.2%} of each document is held out: too few are there to hold out whole ones"
    num_epochs = config.num_tokens / tokens_an_epoch
    text = total(index.splits["train"])
    warning = ": the model will memorise it" if num_epochs > _MOST_EPOCHS else ""
    read = text_facts(config.data).num_tokens
    first = "" if read == text.num_tokens else f", of which the first {read:,} are read"
    yield f"text  {megabytes(text.num_bytes)}, {text.num_tokens:,} tokens{first}; {num_epochs:.3g} epochs{warning}"
    if budget is not None and budget.num_tokens(config, tokens_an_epoch) != config.num_tokens:
        yield (
            f"      {budget} are rounded to {config.num_steps:,} whole steps of {config.tokens_per_step:,}, "
            f"{config.num_tokens:,} tokens"
        )
    yield f"run   {config.directory}"


def _outer_line(config: TrainConfig) -> Iterator[str]:
    """A warning of η and μ that do not fit the number of outer steps."""
    if config.method == "data_parallel" or config.rendezvous is not None:
        return
    rule, _ = rules_of(config.diloco)
    if type(rule) is not Nesterov:
        return
    facts = auto_facts(config)
    excess = expected_excess(rule.lr, rule.momentum, *facts)
    if excess > _FAR_FROM_AUTO:
        lr, momentum = chosen(*facts)
        yield (
            f"outer with {facts[0]} outer steps, η = {rule.lr:g} and μ = {rule.momentum:g} are expected to end "
            f"{excess:.1%} above diloco.outer=auto, which takes {lr:g} and {momentum:g}"
        )


_FAR_FROM_AUTO = 0.01
"""The part of the loss above which a start warns; the rule's own error is some 0.003."""


def change_lines(changes: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Lines about the settings in which a resume differs from its run, by their names."""
    for name, (before, now) in changes.items():
        is_left_out = name == "optimizer.warmup_steps" and now is None
        yield f"      {name} is {_WARMUP_LEFT_OUT if is_left_out else now} from here on, and was {before}"


def forecast_lines(config: TrainConfig, forecast: "Forecast") -> Iterator[str]:
    """Lines about a run that was not started."""
    state, logits = megabytes(forecast.state_bytes), megabytes(forecast.logits_bytes)
    least = megabytes(forecast.state_bytes + forecast.logits_bytes)
    trained = ""
    if forecast.num_trained_params < forecast.num_params:
        trained = f", of which {forecast.num_trained_params:,} are trained"
    replicas = f"{config.num_replicas} replicas" if config.rendezvous is None else "as many replicas as join"
    yield f"model  {forecast.num_params:,} parameters{trained}, {replicas}"
    yield (
        f"memory at least {least} a process: {state} of parameters, gradients, optimizer and outer state, "
        f"{logits} of logits in a pass of {config.micro_batch} × {config.sequence_length} tokens; "
        "activations come on top"
    )
    yield f"steps  {config.num_steps:,} of {config.tokens_per_step:,} tokens: {config.num_tokens:,} tokens"
    if config.rendezvous is not None:
        own_tokens = config.replica_tokens
        yield (
            f"       of all replicas that join; this one reads {own_tokens:,} tokens per step, and alone would "
            f"take {-(-config.num_tokens // own_tokens):,} steps"
        )
    yield _rate_line(config)
    yield _syncs_line(config, forecast)
    if config.rendezvous is not None:
        yield "bytes  depend on how many replicas take part"
        return
    yield (
        f"bytes  {megabytes(forecast.bytes_sent)} sent by a replica, {megabytes(max(forecast.sync_bytes))} in the "
        f"largest sync; Data-Parallel: {megabytes(forecast.data_parallel_bytes)}"
    )
    sync, whole, dp = (
        8 * size / (1e9 * _LINK_GBIT_S)
        for size in (max(forecast.sync_bytes), forecast.bytes_sent, forecast.data_parallel_bytes)
    )
    yield (
        f"link   {_LINK_GBIT_S:g} Gbit/s each way would be busy for {sync:.2g} s a sync, {whole:,.2g} s in all; "
        f"with Data-Parallel for {dp:,.2g} s"
    )


def _rate_line(config: TrainConfig) -> str:
    return f"rate   {learning_rate_text(config, warmup=_WARMUP_LEFT_OUT)}"


def _syncs_line(config: TrainConfig, forecast: "Forecast") -> str:
    schedule = forecast.schedule
    if schedule is None:
        return "syncs  gradients are reduced at every step"
    steps = ", ".join(str(schedule.send_step(p)) for p in range(schedule.num_fragments))
    tau = ", ".join(map(str, schedule.overlaps))
    return (
        f"syncs  H = {schedule.sync_every} steps apart, in {config.diloco.wire}; {schedule.num_fragments} "
        f"fragments, first sent after step {steps}, and merged τ = {tau} steps later"
    )
