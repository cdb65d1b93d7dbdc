"""FP32 masters: the weights that an optimizer keeps beside a model's low-precision parameters."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from diloco.engine.sharded import local
from diloco.errors import UserError


class Masters(Protocol):
    """The way to weights that an optimizer updates in the place of the model's parameters: they are θ then.

    Every process of a replica calls both methods for the same parameters in the same order.
    """

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The FP32 masters of these parameters, by name, shaped, sharded and placed as the parameters are.

        Before `write` the engine may change them in place.
        """
        ...

    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Take what a merge made of masters, by name, and give the model's parameters their new values."""
        ...


class MasterTensors:
    """Masters that are plain tensors, as Apex and most mixed-precision optimizers keep them.

    Args:
        model: the replica's copy.
        tensors: the FP32 master of each parameter, by its name in the model; looked up anew at each use.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._parameters, self._tensors = dict(model.named_parameters()), tensors

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors themselves.

        Raises:
            UserError: naming a parameter that has none.
        """
        for name in names:
            if name not in self._tensors:
                raise UserError(f"masters has no tensor for parameter {name}: give one a parameter", "masters")
        return {name: self._tensors[name] for name in names}

    @torch.no_grad()
    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Round the masters, which were changed in place, to the parameters' dtype."""
        for name, master in masters.items():
            local(self._parameters[name]).copy_(local(master))


def masters_of(model: nn.Module, masters: "Masters | Mapping[str, Tensor] | None") -> Masters | None:
    """The adapter that the user gave, or one for the tensors that he gave.

    Raises:
        UserError: if it is neither.
    """
    if isinstance(masters, Mapping):
        return MasterTensors(model, masters)
    if masters is None or (hasattr(masters, "read") and hasattr(masters, "write")):
        return masters
    raise UserError(
        f"masters={masters!r} must map each parameter's name to its FP32 tensor, or be an adapter of "
        "diloco.integrations, with read() and write()",
        "masters",
    )


def check_master(name: str, master: Tensor, parameter: Tensor) -> None:
    """Refuse a master that the engine can't compute with.

    Raises:
        UserError: naming the parameter.
    """
    actual, expected = local(master), local(parameter)
    if (actual.dtype, actual.shape, actual.device) != (torch.float32, expected.shape, expected.device):
        raise UserError(
            f"the master of parameter {name} is {tuple(actual.shape)}, {actual.dtype}, on {actual.device}: it "
            f"must be {tuple(expected.shape)}, torch.float32, on {expected.device}",
            "masters",
        )
