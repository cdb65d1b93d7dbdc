"""The sentences about a run: its result, how it was made, and what its model writes."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from diloco.data.shards import INDEX_FILE, read_index, total
from diloco.errors import UserError
from diloco.report.text import factor, rounded
from diloco.schema import read_json
from diloco.training.config.config import TrainConfig
from diloco.training.records.metrics import metrics_file
from diloco.training.records.samples import SAMPLES_FILE, Sample
from diloco.training.records.summary import Summary
from diloco.training.records.tail import RunTail

CommandOf = Callable[[Path], str]
"""The command line that started the run in a directory; empty if it can't be told."""
_MOST_SAMPLES = 4


def headline(run: RunTail) -> str:
    """A sentence that says the result of a run, or how far it is."""
    config, summary = run.config, run.summary
    if config is None or run.last is None:
        return ""
    if summary is None:
        params = rounded(config.model.num_params)
        replicas = "" if config.rendezvous is not None else f", {_replicas(config.num_replicas)}"
        return f"{params} parameters{replicas}: training loss {run.loss:.3g} at {run.part:.0%} of the run"
    sentence = (
        f"{rounded(summary.num_params)} parameters, {_replicas(summary.num_replicas)}: held-out loss "
        f"{summary.eval_loss:.3g} after {rounded(summary.num_tokens)} tokens"
    )
    sent, data_parallel = summary.bytes_sent_per_replica, summary.data_parallel_bytes_per_replica
    if summary.method == "data_parallel" or not sent or data_parallel <= sent:
        return sentence
    return f"{sentence}, {factor(data_parallel / sent)}× fewer bytes than Data-Parallel"


def _replicas(count: int) -> str:
    return f"{count} replica{'s' * (count > 1)}"


def comparison_headline(names: Sequence[str], runs: Sequence[RunTail]) -> str:
    """A sentence that names the best of several runs by held-out loss."""
    results = [(run.summary.eval_loss, name) for name, run in zip(names, runs, strict=True) if run.summary]
    if len(results) < 2:
        return ""
    (loss, best), *others = sorted(results)[:_MOST_SAMPLES]
    then = ", ".join(f"{name} {other:.4g}" for other, name in others)
    return f"Lowest held-out loss: {best}, {loss:.4g}; then {then}"


def setup(run: RunTail, command_of: CommandOf) -> dict[str, str]:
    """The command, the date, the machine, the data and the settings of a run, by name."""
    config = run.config
    if config is None:
        return {}
    facts = {
        "command": command_of(run.directory),
        "date": _date(run.directory, next(iter(run.replicas), 0)),
        "machine": "" if run.summary is None else _machine(run.summary),
        "data": _data(config),
    }
    return {name: value for name, value in facts.items() if value} | config_setup(config)


def config_setup(config: TrainConfig) -> dict[str, str]:
    """The model, the batch and the learning rate of a run, by name."""
    return {
        "model": _model(config),
        "batch": f"{config.global_batch} sequences of {config.sequence_length:,} tokens per step, all replicas",
        "learning rate": f"warm-up of {learning_rate_text(config)}",
    }


def _date(directory: Path, replica: int) -> str:
    """The time of the last step on this machine."""
    try:
        written = metrics_file(directory, replica).stat().st_mtime
    except OSError:
        return ""
    return moment(written)


def moment(seconds: float) -> str:
    """A date and time of day for people, from seconds since the epoch."""
    now = time.localtime(seconds)
    return f"{now.tm_mday} {time.strftime('%B %Y, %H:%M', now)}"


def _machine(summary: Summary) -> str:
    return ", ".join(filter(None, (summary.machine or summary.device, summary.precision)))


def _model(config: TrainConfig) -> str:
    model = config.model
    sizes = {
        "num_layers": "layers",
        "num_heads": "heads",
        "width": "wide",
        "vocab_size": "tokens in the vocabulary",
    }
    parts = [f"{getattr(model, name):,} {noun}" for name, noun in sizes.items() if getattr(model, name, 0)]
    return f"{model.num_params:,} parameters" + (f": {', '.join(parts)}" if parts else "")


def _data(config: TrainConfig) -> str:
    """The text as its own directory describes it, if it is on this machine; else as the config does."""
    data, size = config.data, ""
    sources: Sequence[str] = data.train
    tokenizer = data.tokenizer
    if data.prepared is not None and (data.prepared / INDEX_FILE).exists():
        try:
            index = read_index(data.prepared)
        except UserError:
            return ""
        sources, tokenizer = index.settings.train, index.settings.tokenizer
        size = f", {rounded(total(index.splits['train']).num_tokens)} tokens"
    return f"{', '.join(sources)}{size}; tokenizer {tokenizer}"


def learning_rate_text(config: TrainConfig, *, warmup: str = "") -> str:
    """The learning rate over a run.

    Args:
        config: the run's.
        warmup: words for the warm-up, where it is not known yet.
    """
    inner = config.optimizer
    down = "a cosine"
    if inner.schedule == "wsd":
        down = f"constant until a decay over the last {inner.decay_fraction:.0%} of the steps,"
    up = warmup if inner.warmup_steps is None else f"{inner.warmup_steps} steps"
    return f"{up} up to {inner.learning_rate:g}, then {down} to {inner.final_fraction:.0%}"


def samples(directory: Path) -> Iterator[Sample]:
    """The texts that a run's model wrote at its end; none if there is no file of them, or it can't be read."""
    path = directory / SAMPLES_FILE
    if not path.exists():
        return
    try:
        yield from read_json(path, list[Sample], most_bytes=1 << 20)[:_MOST_SAMPLES]
    except UserError as error:
        yield Sample(prompt="", text=str(error))
