"""Read the parameters that a run saved, and evaluate them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.data.tokenizers import Tokenizer, load_tokenizer
from diloco.errors import CheckpointError, UserError, setting
from diloco.evaluation.questions import read_questions
from diloco.files import require
from diloco.hub import check_reachable
from diloco.models.language_model import LanguageModel
from diloco.models.writer import Writer
from diloco.rendezvous.log.log import is_store
from diloco.schema import read_json
from diloco.training.config.config import Parameters, TrainConfig
from diloco.training.config.resolve import check_sizes
from diloco.training.records.checkpoints import finished_steps, read, read_files
from diloco.training.records.runs import check_text, read_config, run_directory
from diloco.training.records.store_runs import store_config, store_parameters
from diloco.training.records.summary import OUTER_FILE, SUMMARY_FILE, Summary, open_held_out


def run_parameters(
    source: Path | str, parameters: Parameters, *, at_step: int | None = None
) -> tuple[LanguageModel, int]:
    """A run's model, on the CPU, and the step that its parameters are from.

    Args:
        source: the directory of a run, over or not; or the store in which its replicas meet, by URL or directory.
        parameters: outer: Θ, which a finished run has written; replica: replica 0's own, θ_0; average: the mean of
            all replicas' own. The last two are read from the newest checkpoint, the average from the newest that
            all replicas hold.
        at_step: the step of the checkpoint to read them from; None is the end, or the newest checkpoint.

    Raises:
        UserError: if there is no run, or a store does not hold these parameters.
        CheckpointError: if no checkpoint holds these parameters, or it is damaged.
        FileError: if a store's log is damaged.
    """
    if is_store(str(source)):
        for field, value, left_out in (("parameters", parameters, "outer"), ("at_step", at_step, None)):
            if value != left_out:
                raise UserError(
                    f"{field}={value}: a store holds the newest outer parameters alone: name a replica's "
                    "directory",
                    field,
                )
        return store_parameters(str(source))
    config = read_config(run_directory(source))
    if parameters == "average" and config.rendezvous is not None:
        raise UserError(
            f"parameters={parameters}: {config.directory} holds one of the replicas that meet in "
            f"{config.rendezvous}: take outer, or replica",
            "parameters",
        )
    check_sizes(config, here=True)
    model = config.model.build(seed=config.seed)
    exported, outer = config.directory / OUTER_FILE, _OWN if config.method == "data_parallel" else _OUTER
    if parameters == "outer" and exported.exists() and at_step is None:
        theta = _as_saved(config, model, outer)
        try:
            read_files([exported], theta, source=str(exported))
        except CheckpointError as error:
            raise CheckpointError(
                f"{exported} can't be read ({error}): copy it again, or delete it to take the newest checkpoint"
            ) from error
        model.load_state_dict(theta)
        return model, _last_step(config)
    holders = _holders(config, parameters)
    step = _held_step(config, holders, at_step)
    if parameters == "outer":
        model.load_state_dict(_read(config, model, holders[0], step, outer))
        return model, step
    thetas = [_read(config, model, replica, step, _OWN) for replica in holders]
    model.load_state_dict(
        {name: torch.stack([theta[name].float() for theta in thetas]).mean(0) for name in thetas[0]}
    )
    return model, step


def newest_step(source: Path | str, parameters: Parameters) -> int | None:
    """The step of the parameters that `run_parameters` reads from a directory now; None before a checkpoint.

    Raises:
        UserError: if there is no run.
    """
    config = read_config(run_directory(source))
    if parameters == "outer" and (config.directory / OUTER_FILE).exists():
        return _last_step(config)
    held = (finished_steps(config.checkpoints, replica) for replica in _holders(config, parameters))
    return max(set.intersection(*map(set, held)), default=None)


def _last_step(config: TrainConfig) -> int:
    """T; for a replica of a store the step of a fixed group that has read as many tokens, as for the store."""
    path = config.directory / SUMMARY_FILE
    if config.rendezvous is None or not path.exists():  # it is written a moment after the parameters
        return config.num_steps
    summary = read_json(path, Summary, most_bytes=1 << 20)
    return min(config.num_steps, summary.num_tokens // config.tokens_per_step)


def _holders(config: TrainConfig, parameters: Parameters) -> range:
    """The replicas whose checkpoints are read; all have the same outer parameters."""
    replicas = range(config.num_local_replicas)
    first = next((m for m in replicas if finished_steps(config.checkpoints, m)), 0) if parameters == "outer" else 0
    return replicas if parameters == "average" else range(first, first + 1)


_OWN, _OUTER = ("model",), ("sync", "outer")
"""The places of a replica's own parameters, and of Θ, among the tensors of a checkpoint."""


def _as_saved(config: TrainConfig, model: LanguageModel, where: Sequence[str]) -> dict[str, Tensor]:
    """The model's tensors, or copies in bfloat16 where a replica trained its own so; Θ is FP32."""
    is_low = where == _OWN and config.precision == "bf16-params"
    return {name: value.bfloat16() if is_low else value for name, value in model.state_dict().items()}


def _held_step(config: TrainConfig, replicas: range, at_step: int | None) -> int:
    """The step asked for, or the newest, of which all these replicas hold a checkpoint."""
    held = {replica: finished_steps(config.checkpoints, replica) for replica in replicas}
    for replica, steps in held.items():
        if not steps:
            here = f"{config.directory} holds no checkpoint of replica {replica}: evaluate where that replica ran"
            if config.checkpoint.every_steps:
                raise CheckpointError(here)
            raise CheckpointError(
                f"{here}, or train with checkpoint.every_steps above 0 (it was 0)", "checkpoint.every_steps"
            )
    common = set.intersection(*map(set, held.values()))
    if not common:
        raise CheckpointError(f"no step has checkpoints of all replicas in {config.checkpoints}")
    if at_step is not None and at_step not in common:
        raise CheckpointError(
            f"at_step={at_step}: {config.checkpoints} holds the steps {', '.join(map(str, sorted(common)))}",
            "at_step",
        )
    return max(common) if at_step is None else at_step


def _read(
    config: TrainConfig, model: LanguageModel, replica: int, step: int, where: Sequence[str]
) -> dict[str, Tensor]:
    parameters = {name: torch.zeros_like(value) for name, value in _as_saved(config, model, where).items()}
    nested: dict[str, Any] = parameters
    for name in reversed(where):
        nested = {name: nested}
    read(config.checkpoints, replica, step, nested)
    return parameters


def finished_config(source: Path | str, prepared: Path | None) -> TrainConfig:
    """The config of a run, with the place of its data.

    Args:
        source: as in `run_parameters`.
        prepared: directory of the run's data, if that was moved, or the run is in a store.

    Raises:
        UserError: if there is no run, or no data, or the data is not the run's.
    """
    if is_store(str(source)):
        return store_config(str(source), prepared)
    config = read_config(run_directory(source))
    if prepared is not None:
        config = replace(config, data=replace(config.data, prepared=prepared))
    check_text(config.directory, config.data, field="prepared")
    return config


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A run's model, ready to write text."""

    model: LanguageModel
    """On its device."""
    step: int
    """The step that its parameters are from."""
    tokenizer: Tokenizer
    context: int
    """Tokens of a sequence of the run's training."""
    device: torch.device

    def writer(self, **sampling: Any) -> Writer:
        """A writer that has read BOS, as at the beginning of a document.

        Args:
            sampling: temperature, top_k and seed, as `Writer` takes them.

        Raises:
            UserError: for a value that `Writer` refuses.
        """
        size = self.tokenizer.vocab_size
        writer = Writer(self.model, context=self.context, device=self.device, vocab_size=size, **sampling)
        writer.read([self.tokenizer.bos_id])
        return writer


def load_model(
    source: Path | str, *, parameters: Parameters = "outer", prepared: Path | None = None, device: str = "auto"
) -> RunModel:
    """A run's model and its tokenizer.

    Args:
        source: as in `run_parameters`.
        parameters: which of its parameters, as in `run_parameters`.
        prepared: as in `finished_config`.
        device: auto, cpu or cuda.

    Raises:
        UserError: if there is no run or no data.
        CheckpointError: as `run_parameters`.
    """
    config = finished_config(source, prepared)
    assert config.data.prepared is not None, "a run's config is resolved"
    tokenizer = load_tokenizer(config.data.prepared)
    (model, step), place = run_parameters(source, parameters), _place(device)
    context = config.sequence_length
    return RunModel(model=model.to(place), step=step, tokenizer=tokenizer, context=context, device=place)


def _place(device: str) -> torch.device:
    """The device of a name, where `auto` is the GPU if there is one."""
    return torch.device(
        "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    )


def evaluate_run(
    source: Path | str,
    *,
    parameters: Parameters = "outer",
    at_step: int | None = None,
    tasks: Mapping[str, Path | None] | None = None,
    limit: int | None = None,
    held_out: bool = True,
    prepared: Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Held-out loss and zero-shot accuracies of a run, as values that `json` writes.

    Args:
        source: as in `run_parameters`.
        parameters: which of its parameters, as in `run_parameters`.
        at_step: as in `run_parameters`.
        tasks: by name, each with its file of questions, or None for lm-evaluation-harness's task of that name.
        limit: largest number of questions of each task, the first ones.
        held_out: measure the held-out loss.
        prepared: as in `finished_config`.
        device: auto, cpu or cuda.

    Raises:
        UserError: if there is no run, no data or no such task.
        CheckpointError: as `run_parameters`.
    """
    tasks = tasks or {}
    if tasks:
        for path in filter(None, tasks.values()):
            read_questions(path)
        require("lm_eval", extra="eval")
        from diloco.evaluation.zero_shot import check_tasks

        check_tasks(tasks)
        if asked := [name for name, path in tasks.items() if path is None]:
            with setting("tasks", ",".join(asked)):
                check_reachable("the questions")
    config = finished_config(source, prepared)
    model, step = run_parameters(source, parameters, at_step=at_step)
    place = _place(device)
    model.to(place)
    result: dict[str, Any] = {"run": str(source), "parameters": parameters, "step": step}
    if held_out:
        split = open_held_out(config)
        measured = split.mean(split.losses(model, split.windows, place))
        result |= {f"eval_{name.removeprefix('num_')}": value for name, value in asdict(measured).items()}
    result["tasks"] = {}
    if tasks:
        from diloco.evaluation.zero_shot import score_tasks

        assert config.data.prepared is not None, "a run's config is resolved"
        tokenizer, length = load_tokenizer(config.data.prepared), config.sequence_length
        result["tasks"] = score_tasks(model, tokenizer, tasks, max_length=length, device=place, limit=limit)
    return result
