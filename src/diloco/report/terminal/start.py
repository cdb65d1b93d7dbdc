"""A run in a terminal before it starts: its text, its budget, what a resume changes, and its forecast."""

from collections.abc import Iterator, Mapping
from typing import Any

from diloco.data.index import read_index, total
from diloco.report.terminal.training import megabytes
from diloco.training.config.config import TrainConfig
from diloco.training.config.forecast import Forecast
from diloco.training.config.resolve import Budget
from diloco.training.prepare import epoch_tokens

_MOST_EPOCHS = 4
"""Passes over a text up to which they are worth almost as much as new text (arXiv 2305.16264)."""

_LINK_GBIT_S = 0.1
_WARMUP_LEFT_OUT = "a tenth of the steps left (at most 1000)"
"""The warm-up of a resume's new phase, before it is known from which step it goes on."""


def start_lines(config: TrainConfig, budget: Budget | None) -> Iterator[str]:
    """Lines about the text, the budget and the directory of a run.

    Args:
        config: resolved.
        budget: as it was asked for; None for a resume that goes on with its own.
    """
    assert config.data.prepared is not None, "the config is resolved"
    index, tokens_an_epoch = read_index(config.data.prepared), epoch_tokens(config, config.data.prepared)
    yield f"data  {config.data.prepared}, digest {index.digest[:16]}"
    if index.held_out_by_position:
        share = index.settings.held_out_fraction
        yield f"      the last {share:.2%} of each document is held out: too few are there to hold out whole ones"
    num_epochs = config.num_tokens / tokens_an_epoch
    text = total(index.splits["train"])
    warning = ": the model will memorise it" if num_epochs > _MOST_EPOCHS else ""
    yield f"text  {megabytes(text.num_bytes)}, {text.num_tokens:,} tokens; {num_epochs:.3g} epochs{warning}"
    if budget is not None and budget.num_tokens(config, tokens_an_epoch) != config.num_tokens:
        yield (
            f"      {budget} are rounded to {config.num_steps:,} whole steps of {config.tokens_per_step:,}, "
            f"{config.num_tokens:,} tokens"
        )
    yield f"run   {config.directory}"


def change_lines(changes: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Lines about the settings in which a resume differs from its run, by their names."""
    for name, (before, now) in changes.items():
        is_left_out = name == "optimizer.warmup_steps" and now is None
        yield f"      {name} is {_WARMUP_LEFT_OUT if is_left_out else now} from here on, and was {before}"


def forecast_lines(config: TrainConfig, forecast: Forecast) -> Iterator[str]:
    """Lines about a run that was not started."""
    state, logits = megabytes(forecast.state_bytes), megabytes(forecast.logits_bytes)
    least = megabytes(forecast.state_bytes + forecast.logits_bytes)
    trained = ""
    if forecast.num_trained_params < forecast.num_params:
        trained = f", of which {forecast.num_trained_params:,} are trained"
    replicas = f"{config.num_replicas} replicas" if config.rendezvous is None else "as many replicas as join"
    yield f"model  {forecast.num_params:,} parameters{trained}, {replicas}"
    yield (
        f"memory at least {least} a process: {state} of parameters, gradients, Adam and outer state, {logits} of "
        f"logits in a pass of {config.micro_batch} × {config.sequence_length} tokens; activations come on top"
    )
    yield f"steps  {config.num_steps:,} of {config.tokens_per_step:,} tokens: {config.num_tokens:,} tokens"
    if config.rendezvous is not None:
        own_tokens = config.process_batch * config.processes_per_replica * config.sequence_length
        yield (
            f"       of all replicas that join; this one reads {own_tokens:,} tokens a step, and alone would take "
            f"{-(-config.num_tokens // own_tokens):,} steps"
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
    inner = config.optimizer
    down = "a cosine"
    if inner.schedule == "wsd":
        down = f"constant until a decay over the last {inner.decay_fraction:.0%} of the steps,"
    warmup = _WARMUP_LEFT_OUT if inner.warmup_steps is None else f"{inner.warmup_steps} steps"
    up = f"{warmup} up to {inner.learning_rate:g}"
    return f"rate   {up}, then {down} to {inner.final_fraction:.0%}"


def _syncs_line(config: TrainConfig, forecast: Forecast) -> str:
    schedule = forecast.schedule
    if schedule is None:
        return "syncs  gradients are reduced at every step"
    steps = ", ".join(str(schedule.send_step(p)) for p in range(schedule.num_fragments))
    tau = ", ".join(map(str, schedule.overlaps))
    return (
        f"syncs  H = {schedule.sync_every} steps apart, in {config.diloco.wire}; {schedule.num_fragments} "
        f"fragments, first sent after step {steps}, and merged τ = {tau} steps later"
    )
