"""The sentences about a run: its result, how it was made, and what its model writes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from diloco.data.shards import Index, read_index, total
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
_MOST_COMPARED = 3
"""Runs that the sentence about several sets beside another one."""


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
    """A sentence that sets the results of runs beside the Data-Parallel one's, or else beside the best one's."""
    over = [run for run in runs if run.summary is not None and run.summary.eval_loss > 0]
    if len(over) < 2:
        return ""
    measure = _common_measure(over)
    if not measure:
        return "held-out losses do not compare: the runs' texts or tokenizers differ"
    results = [(name, run.summary) for name, run in zip(names, runs, strict=True) if run in over and run.summary]
    results.sort(key=lambda one: (one[1].method != "data_parallel", getattr(one[1], measure)))
    (base_name, base), *others = results[: 1 + _MOST_COMPARED]
    return "; ".join(f"{name}: {_beside(summary, base, base_name, measure)}" for name, summary in others)


_MEASURES = {"eval_loss": "held-out loss", "eval_bits_per_byte": "held-out bits per byte"}
"""The fields of a summary by which runs are compared, with their names."""


def _common_measure(runs: Sequence[RunTail]) -> str:
    """The field of the summary by which runs compare: the loss on the same tokens, else bits per byte on one text.

    It is empty where the held-out texts differ, and where an index that could tell is gone.
    """
    if not do_texts_differ(runs):
        return "eval_loss"
    indices = [index for run in runs if (index := _own_index(run)) is not None]
    if len(indices) < len(runs):
        return ""
    tokens = {
        (index.tokenizer_digest, *(shard.tokens_digest for shard in index.splits["held_out"])) for index in indices
    }
    if len(tokens) == 1:
        return "eval_loss"
    texts = {
        (
            replace(index.settings, tokenizer="", tokenizer_file_digest=""),
            total(index.splits["held_out"]).num_bytes,
        )
        for index in indices
    }
    return "eval_bits_per_byte" if len(texts) == 1 else ""


def do_texts_differ(runs: Sequence[RunTail]) -> bool:
    """True for runs whose texts, or the tokens of their texts, are not the same."""
    return len({run.text.digest for run in runs if run.text is not None}) > 1


def _own_index(run: RunTail) -> Index | None:
    """The index of the text that a run was started on; None if its directory is gone, or holds other text now."""
    assert run.config is not None and run.text is not None, "the run has begun"
    assert run.config.data.prepared is not None, "the config is resolved"
    try:
        index = read_index(run.config.data.prepared)
    except UserError:
        return None
    return index if index.digest == run.text.digest else None


def _beside(summary: Summary, base: Summary, base_name: str, measure: str) -> str:
    """The result of a run beside another one's."""
    percent = 100 * (getattr(summary, measure) / getattr(base, measure) - 1)
    loss = f"{_MEASURES[measure]} {abs(percent):.1f} % {'above' if percent > 0 else 'below'} {base_name}'s"
    if abs(percent) < 0.05:
        loss = f"the same {_MEASURES[measure]} as {base_name}"
    sent, base_sent = summary.bytes_sent_per_replica, base.bytes_sent_per_replica
    if not sent or not base_sent:
        return loss
    more, ratio = ("more", sent / base_sent) if sent > base_sent else ("fewer", base_sent / sent)
    return f"{loss}, {factor(ratio)}× {more} bytes sent" if ratio >= 1.05 else f"{loss}, as many bytes sent"


def setup(run: RunTail, command_of: CommandOf) -> dict[str, str]:
    """The command, the date, the machine, the data and the settings of a run, by name."""
    config = run.config
    if config is None:
        return {}
    facts = {
        "command": command_of(run.directory),
        "date": _date(run.directory, next(iter(run.replicas), 0)),
        "machine": "" if run.summary is None else _machine(run.summary),
        "data": _data(run),
    }
    return {name: value for name, value in facts.items() if value} | config_setup(config)


def config_setup(config: TrainConfig) -> dict[str, str]:
    """The model, the batch and the learning rate of a run, by name."""
    return {
        "model": _model(config),
        "batch": f"{config.global_batch} sequences of {config.sequence_length:,} tokens per step, all replicas",
        "inner optimizer": config.optimizer.name,
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


def _data(run: RunTail) -> str:
    """The text as its own directory describes it, if it is on this machine; else that directory and the digest."""
    assert run.config is not None and run.text is not None, "the run has begun"
    index = _own_index(run)
    if index is None:
        return f"{run.config.data.prepared}, digest {run.text.digest[:16]}"
    size = f"{rounded(run.text.num_tokens)} tokens"
    return f"{', '.join(index.settings.train)}, {size}; tokenizer {index.settings.tokenizer}"


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
    if inner.name == "schedule_free":
        down = "constant"
    else:
        down += f" to {inner.final_fraction:.0%}"
    up = warmup if inner.warmup_steps is None else f"{inner.warmup_steps} steps"
    return f"{up} up to {inner.learning_rate:g}, then {down}"


def samples(directory: Path) -> Iterator[Sample]:
    """The texts that a run's model wrote at its end; none if there is no file of them, or it can't be read."""
    path = directory / SAMPLES_FILE
    if not path.exists():
        return
    try:
        yield from read_json(path, list[Sample], most_bytes=1 << 20)[:_MOST_SAMPLES]
    except UserError as error:
        yield Sample(prompt="", text=str(error))
