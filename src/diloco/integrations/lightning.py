"""Lightning: one callback trains a replica in a `Trainer` of lightning.pytorch."""

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, cast

from torch import nn

from diloco.engine.streaming import StreamingDiLoCo, check_job, check_optimizers
from diloco.errors import UserError
from diloco.exchange.transport import agree
from diloco.files import requiring

with requiring("lightning", extra="lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.trainer.states import TrainerFn

_STATE = "diloco"
"""The key of a checkpoint under which the callback keeps what it resumes from."""


class DiLoCoCallback(Callback):
    """Trains one replica in a `Trainer`; every replica is a job of its own, with its own default_root_dir.

    An inner step is one of the optimizer, counted at the end of its batch by `trainer.global_step`: micro-steps of
    an accumulation do not count, and a step that a gradient scaler skipped does. Where there are several
    optimizers, a batch in which any has stepped counts once. Validation inside `fit` is that of Θ. Checkpoints
    hold Θ as the weights, and beside them the replica's own parameters and the engine's state, from which
    `fit(ckpt_path=…)` resumes; so the best checkpoint by a validation metric is the model of that metric. After
    `fit` the model is Θ.

    Args:
        build: the engine of a LightningModule, which has its initial parameters when `fit` begins.

    Raises:
        UserError: if the Trainer would shard the model, average the replicas' gradients, or save or end with other
            parameters than Θ.

    Source: the order of events in lightning.pytorch's `Trainer._run`, and its `WeightAveraging`.
    """

    def __init__(self, build: Callable[[nn.Module], StreamingDiLoCo]) -> None:
        self._build = build
        self._engine: StreamingDiLoCo | None = None
        self._global_step: int | None = None  # before training begins
        self._outer: ExitStack | None = None  # closing it gives the model its own parameters back

    @property
    def engine(self) -> StreamingDiLoCo:
        """The engine, from the start of `fit` on."""
        if self._engine is None:
            raise UserError("the engine is built when trainer.fit() begins")
        return self._engine

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Build the engine on the model's device, before a checkpoint is loaded."""
        if stage != TrainerFn.FITTING:
            return
        if self._engine is not None:
            raise UserError("this engine has trained already: make a new Trainer with a new DiLoCoCallback")
        _check(trainer)
        pl_module.configure_model()
        trainer.precision_plugin.convert_module(pl_module)
        pl_module.to(trainer.strategy.root_device)
        self._engine = self._build(pl_module)
        check_job(trainer.world_size, self._engine)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Resume from the replica's own parameters and the engine's state."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if _STATE not in checkpoint:
            raise UserError(
                "this checkpoint was saved without DiLoCoCallback: load its weights into the LightningModule "
                "before trainer.fit(), and leave out ckpt_path",
                "ckpt_path",
            )
        pl_module.load_state_dict(checkpoint[_STATE]["own"], strict=pl_module.strict_loading)
        self.engine.load_state_dict(checkpoint[_STATE]["engine"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the replicas' numbers of steps, and what the optimizers train with the engine's parameters."""
        if any(callable(getattr(optimizer, "eval", None)) for optimizer in trainer.optimizers):
            raise UserError("a schedule-free optimizer evaluates parameters of its own, not Θ: take another")
        check_optimizers(self.engine, trainer.optimizers)
        self._global_step = trainer.global_step
        names = ("estimated_stepping_batches", "global_step")
        exchange = self.engine.exchange
        assert exchange is not None, "check_job has refused a rendezvous"
        agree(exchange, {name: getattr(trainer, name) for name in names})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the inner steps of the batch."""
        assert self._global_step is not None, "on_train_start was called"
        num_steps = trainer.global_step - self._global_step
        self._global_step += num_steps
        for _ in range(num_steps if len(trainer.optimizers) == 1 else min(num_steps, 1)):
            self.engine.step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put Θ in the place of the model's own parameters."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._put_outer_in()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model its own parameters back, before a checkpoint is saved."""
        self._take_outer_out()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the model its own parameters back."""
        self._take_outer_out()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save Θ as the weights, and beside it what `on_load_checkpoint` takes up."""
        if self._engine is None:
            return
        is_inside = self._outer is not None  # a validation that a scheduler's signal has interrupted
        self._take_outer_out()
        state_dict = trainer.strategy.lightning_module_state_dict
        own, engine_state = state_dict(), self._engine.state_dict()
        with self._engine.outer_parameters_applied():
            checkpoint["state_dict"] = deepcopy(state_dict())
        if is_inside:
            own = deepcopy(own)
            self._put_outer_in()
        checkpoint[_STATE] = {"own": own, "engine": engine_state}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what is in flight, and leave Θ in the model."""
        self.engine.finish()
        self.engine.copy_outer_to_model()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave Θ in the model, too, where `ckpt_path` was of the end, and `fit` has trained nothing."""
        if self._global_step is None:
            pl_module.to(trainer.strategy.root_device)  # Lightning has moved it to the CPU
            self.on_train_end(trainer, pl_module)

    def _put_outer_in(self) -> None:
        self._outer = ExitStack()
        self._outer.enter_context(self.engine.outer_parameters_applied())

    def _take_outer_out(self) -> None:
        if self._outer is not None:
            self._outer.close()
            self._outer = None


def _check(trainer: Trainer) -> None:
    """Refuse a Trainer that shards the model, or would save or end with other parameters than Θ."""
    if trainer.strategy.restore_checkpoint_after_setup:
        raise UserError(
            f"DiLoCoCallback is for whole replicas, on one device or under DDP, not with "
            f"{type(trainer.strategy).__name__}: for FSDP2 give StreamingDiLoCo the sharded model in a loop of "
            "your own"
        )
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise UserError(
                f"{type(callback).__name__} would leave its own average in the model, not Θ: leave it out"
            )
        if getattr(callback, "save_weights_only", False):
            raise UserError(
                "save_weights_only=True would save one replica's own parameters, and nothing to resume from: set "
                "it to False; the checkpoints hold Θ as their weights",
                "save_weights_only",
            )
