"""transformers' `Trainer`, and trl's `SFTTrainer`: one callback trains a replica in the Trainer's own loop."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.engine.streaming import StreamingDiLoCo, check_job, check_optimizers
from diloco.errors import CheckpointError, CheckpointWriteError, UserError
from diloco.exchange.transport import agree
from diloco.files import requiring, writing
from diloco.outer.digest import parameters_hash

with requiring("transformers", extra="transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import HubStrategy

_REFUSED = {
    "load_best_model_at_end": "would end with one replica's own parameters: set it to False; the model ends as Θ",
    "save_only_model": "would save one replica's own parameters as the model, and nothing to resume from: set it "
    "to False, and call trainer.save_model() after training, which saves Θ",
    "auto_find_batch_size": "would start again in mid-run, on this replica alone: set per_device_train_batch_size",
    "enable_jit_checkpoint": "would save a checkpoint without the engine's state: set it to False",
    "fp16_full_eval": "moves the model to its device only after the engine was built: set it to False",
    "bf16_full_eval": "moves the model to its device only after the engine was built: set it to False",
    "fsdp": "shards the model after the engine was built: leave it out",
    "deepspeed": "keeps weights of its own, which undo every merge: leave it out",
}


class DiLoCoCallback(TrainerCallback):
    """Trains one replica in a `Trainer` or `SFTTrainer`; every replica is a job of its own.

    An inner step is one step of the optimizer: gradient accumulation, clipping and schedules stay the Trainer's.
    Evaluations and predictions are those of Θ, and after training the model is Θ: `trainer.save_model()` saves it.
    A checkpoint holds the replica's own parameters and the engine's state, for `resume_from_checkpoint`.

    Args:
        build: the engine of a model, which has its initial parameters when the Trainer is constructed.

    Raises:
        UserError: if a training argument would evaluate or save other parameters than Θ without a word.

    Source: the order of events in transformers' `Trainer._inner_training_loop` and `Trainer.evaluation_loop`.
    """

    def __init__(self, build: Callable[[nn.Module], StreamingDiLoCo]) -> None:
        self._build = build
        self._engine: StreamingDiLoCo | None = None
        self._model: nn.Module | None = None
        self._parameters: dict[str, nn.Parameter] = {}  # those that are trained, also while they are frozen later
        self._training = False
        self._outer: ExitStack | None = None  # closing it gives the model its own parameters back

    @property
    def engine(self) -> StreamingDiLoCo:
        """The engine, from the construction of the Trainer on."""
        if self._engine is None:
            raise UserError("give DiLoCoCallback to the Trainer as one of its callbacks: it was added afterwards")
        return self._engine

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Build the engine, before anything trains or loads the model."""
        for name, reason in _REFUSED.items():
            if value := getattr(args, name, None):
                raise UserError(f"{name}={value} {reason}", name)
        strategy = HubStrategy(args.hub_strategy)
        if args.push_to_hub and strategy is not HubStrategy.END:
            raise UserError(
                f"hub_strategy={strategy.value} would push one replica's own parameters: set it to end, which "
                "pushes Θ",
                "hub_strategy",
            )
        self._model = model = kwargs["model"]
        self._engine = self._build(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_job(args.world_size, self._engine)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare the replicas' numbers of steps, and take up the state of a checkpoint."""
        if self.engine.num_steps:
            raise UserError("this engine has trained already: make a new Trainer with a new DiLoCoCallback")
        if kwargs["model"] is not self._model:
            raise UserError("the Trainer has made a new model for train(): give it model, not model_init")
        exchange = self.engine.exchange
        assert exchange is not None, "check_job has refused a rendezvous"
        agree(exchange, {"max_steps": state.max_steps, "steps already taken": state.global_step})
        if state.global_step:
            self._resume(_state_file(args, state))
        # The Trainer calls both, for optimizers that train other parameters than they evaluate.
        optimizer = kwargs["optimizer"]
        if callable(getattr(getattr(optimizer, "optimizer", optimizer), "eval", None)):
            raise UserError("a schedule-free optimizer evaluates parameters of its own, not Θ: take another")
        check_optimizers(self.engine, [optimizer])
        optimizer.eval, optimizer.train = self._put_outer_in, self._take_outer_out
        self._training = True

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Count an inner step, one that a gradient scaler skipped too."""
        self.engine.step()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Refuse a Trainer that evaluates the replica's own parameters."""
        if self._training and self._outer is None:
            raise UserError("evaluation_loop must call self.optimizer.eval() first, as the Trainer's does: for Θ")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Give the model its own parameters back, before a checkpoint is saved."""
        self._take_outer_out()

    on_predict = on_evaluate

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the engine's state in the Trainer's checkpoint.

        Raises:
            FileWriteError: if it can't be written; nothing is left of it.
        """
        if args.should_save:
            _save(_state_file(args, state), self.engine.state_dict(), parameters_hash(self._parameters))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Merge what is in flight, and leave Θ in the model."""
        self._take_outer_out()
        self._training = False
        del kwargs["optimizer"].eval, kwargs["optimizer"].train
        self.engine.finish()
        self.engine.copy_outer_to_model()

    def _resume(self, path: Path) -> None:
        if not path.exists():
            raise UserError(f"{path} does not exist: resume a checkpoint in output_dir, which this callback saved")
        engine_state, parameters = _saved(path)
        if parameters != parameters_hash(self._parameters):
            raise UserError(
                f"{path} was saved with other parameters than those that the Trainer has loaded: resume from a "
                "checkpoint in this replica's own output_dir"
            )
        self.engine.load_state_dict(engine_state)

    def _put_outer_in(self) -> None:
        if self._outer is None:
            self._outer = ExitStack()
            self._outer.enter_context(self.engine.outer_parameters_applied())

    def _take_outer_out(self) -> None:
        if self._outer is not None:
            self._outer.close()
            self._outer = None


def _save(path: Path, engine_state: Mapping[str, Any], parameters: str) -> None:
    """Write a file that `_saved` reads, whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        with writing(path):
            torch.save({"engine": engine_state, "parameters": parameters}, partial)
            partial.replace(path)
    except RuntimeError as error:  # torch's writer does not keep what the operating system said
        parts = [part for part in engine_state.values() if isinstance(part, Mapping)]
        tensors = [value for part in parts for value in part.values() if isinstance(value, Tensor)]
        raise CheckpointWriteError(
            f"can't write {path}: torch could not write all of it, as on a full disk (needs more than "
            f"{sum(tensor.nbytes for tensor in tensors):,} bytes)"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _saved(path: Path) -> tuple[dict[str, Any], str]:
    """The engine's state, and the hash of the model's parameters, from a file that `_save` wrote.

    Raises:
        CheckpointError: if it is damaged, or holds anything else; no code in it is run.
    """
    try:
        saved = torch.load(path, weights_only=True)
    except Exception as error:  # torch's reader raises errors of any class, and advises to trust the file
        raise CheckpointError(
            f"{path} can't be read ({type(error).__name__}): it is damaged, or holds more than tensors and "
            "numbers: resume another checkpoint"
        ) from error
    if isinstance(saved, dict):
        engine_state, parameters = saved.get("engine"), saved.get("parameters")
        if isinstance(engine_state, dict) and isinstance(parameters, str):
            return engine_state, parameters
    raise CheckpointError(f"{path} does not hold what this callback saves: resume another checkpoint")


def _state_file(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}", "diloco.pt")
