"""Accelerate: a context around a training loop, used as Accelerate's own `LocalSGD` is."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast

from torch import nn

from diloco.engine.streaming import StreamingDiLoCo, check_job, is_trained_by
from diloco.errors import UserError
from diloco.files import requiring

with requiring("accelerate", extra="accelerate"):
    from accelerate import Accelerator, DistributedType


class DiLoCo:
    """Trains one replica in a loop with Accelerate; every replica is a job of its own.

    In the context the engine counts the steps of the model's optimizer, or of several the one that was prepared
    last; micro-steps of an accumulation do not count, and a step that a gradient scaler skipped does. At the end
    of the context everything in flight is merged, and Θ is left in the model. A loop may enter it again, in each
    epoch: it is made once, before the loop, since it holds the outer momentum. `accelerator.save_state` and
    `load_state` keep the engine's state with the rest. Evaluate Θ in `engine.outer_parameters_applied()`.

    Args:
        accelerator: the replica's own; it has prepared the optimizer when the context begins.
        model: the model that `accelerator.prepare` returned, with the initial parameters that all replicas share.
        build: the engine of a model, which is passed without Accelerate's wrappers.

    Raises:
        UserError: if Accelerate shards the model, or leaves its optimizer's weights to DeepSpeed or Megatron-LM,
            or the model has a DiLoCo already.
    """

    def __init__(
        self, *, accelerator: Accelerator, model: nn.Module, build: Callable[[nn.Module], StreamingDiLoCo]
    ) -> None:
        kind = accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise UserError(
                f"DiLoCo is for whole replicas, as LocalSGD is, not with {kind.value}: for FSDP2 give "
                "StreamingDiLoCo the sharded model, and save its state with torch.distributed.checkpoint"
            )
        self._accelerator = accelerator
        self._model = cast(nn.Module, accelerator.unwrap_model(model, keep_torch_compile=False))
        if any(isinstance(other, DiLoCo) and other._model is self._model for other in accelerator._custom_objects):
            raise UserError(
                "this model has a DiLoCo, and another would begin with no outer momentum: make one before the "
                "loop over epochs, and enter it (`with`) in each"
            )
        self.engine = build(self._model)
        """The engine."""
        check_job(accelerator.num_processes, self.engine)
        accelerator.register_for_checkpointing(self)

    def __enter__(self) -> Self:
        prepared = self._accelerator._optimizers
        if not prepared:
            raise UserError(
                "prepare the optimizer with accelerator.prepare before the loop: its steps are counted"
            )
        of_model = [optimizer for optimizer in prepared if is_trained_by(self.engine, optimizer)]
        self._attachment = self.engine.attach((of_model or prepared)[-1])
        return self

    def step(self) -> None:
        """Do nothing, where `LocalSGD.step()` stands: the engine counts the optimizer's own steps."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._attachment.remove()
        if kind is not None:
            return
        if not self.engine.num_steps:
            raise UserError("the optimizer took no step in this context: train inside of it")
        self.engine.finish()
        self.engine.copy_outer_to_model()

    def state_dict(self) -> dict[str, Any]:
        """The engine's state, for `accelerator.save_state`."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, for `accelerator.load_state`."""
        self.engine.load_state_dict(state)
