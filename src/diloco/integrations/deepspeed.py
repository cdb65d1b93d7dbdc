"""DeepSpeed's FP32 masters, ZeRO-1 and ZeRO-2: each process of a replica keeps a partition of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.errors import UserError


class DeepSpeedMasters:
    """The `masters` of a model under DeepSpeed, for parameters in BF16, FP16 or FP32.

    The parameters are copies of the masters, which DeepSpeed writes over them in each step. Every process of the
    replica reads the whole of a fragment's masters, by one all-reduce a parameter inside the replica. Attached
    to DeepSpeed's optimizer, the engine counts the steps that end an accumulation of gradients.

        model, optimizer, _, _ = deepspeed.initialize(model=network, config=config)
        engine = diloco.StreamingDiLoCo(model.module, ..., masters=DeepSpeedMasters(model),
                                        exchange=diloco.connect(..., leader=True))
        engine.attach(optimizer)

    Args:
        model: what `deepspeed.initialize` returned; build the engine on it, or on its `module`, after that.

    Raises:
        UserError: under ZeRO-3, which cuts the parameters themselves.
    """

    def __init__(self, model: Any) -> None:
        if (stage := model.zero_optimization_stage()) == 3:
            raise UserError(
                "DeepSpeed's ZeRO-3 leaves no process with whole parameters: set zero_optimization.stage to 1 or "
                "2, or shard the model with fully_shard, which the engine knows"
            )
        self.wrapper = model.optimizer
        """The optimizer to attach: it steps the one inside once per group of parameters."""
        self._stage = stage
        self._parameters = dict(model.named_parameters()) | dict(model.module.named_parameters())

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of whole masters, the same on all processes of the replica.

        Raises:
            UserError: if DeepSpeed keeps none.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        masters: dict[str, Tensor] = {}
        for name in names:
            master = safe_get_full_fp32_param(self._parameters[name])
            if master is None:
                raise UserError(
                    f"DeepSpeed keeps no FP32 master of parameter {name} under ZeRO stage {self._stage}: set "
                    "zero_optimization.stage to 1 or 2, or leave masters out if the optimizer keeps none",
                    "masters",
                )
            masters[name] = master
        return masters

    @torch.no_grad()
    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Give this process's partition its part of each master, and round the whole to the parameter."""
        from deepspeed.utils import safe_set_full_fp32_param

        for name, master in masters.items():
            safe_set_full_fp32_param(self._parameters[name], master)
            self._parameters[name].copy_(master)
