"""The buffers of a model are in no fragment: those that training changes are named, or averaged at the end.

Shapes: B elements of the buffers together.
"""

import warnings

import torch
from torch import Tensor, nn

from diloco.engine.parameters import local
from diloco.exchange.transport import Transport, agree, share, swap
from diloco.outer.step import outer_digest

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Buffers:
    """The persistent floating-point buffers of a model, such as the running statistics of BatchNorm.

    Caches, which are no part of the model's state, and sparse tensors are left out.

    Args:
        model: the replica's copy, as it begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = model.state_dict().keys() & dict(model.named_buffers()).keys()
        self.begin()

    def begin(self) -> None:
        """Remember the present buffers, such as after a load, as those with which training begins."""
        self._digests = self._digests_now()

    def _named(self) -> dict[str, Tensor]:
        named = {name: buffer for name, buffer in self._model.named_buffers() if name in self._names}
        return {
            name: local(buffer)
            for name, buffer in named.items()
            if buffer.layout is torch.strided and buffer.dtype in _DTYPES
            if not (buffer.is_meta or buffer.is_nested)
        }

    def _digests_now(self) -> dict[str, int]:
        return {name: outer_digest(_as_fp32(buffer.reshape(-1))) for name, buffer in self._named().items()}

    def changed(self) -> list[str]:
        """The names of those that have changed since the beginning."""
        return [name for name, digest in self._digests_now().items() if self._digests.get(name) != digest]

    def warn(self, remedy: str) -> None:
        """Name those that training has changed; the warning points to the caller of `step`."""
        if names := self.changed():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warnings.warn(
                f"training changes buffers, which are not exchanged: {', '.join(names[:3])}{more} stay each "
                f"replica's own, and the outer parameters are evaluated with them: {remedy}",
                stacklevel=4,
            )

    def average(self, transport: Transport) -> None:
        """Average the buffers that have changed on any replica; all replicas get the same bits.

        Raises:
            ExchangeError: if a replica sends none.
            DisagreementError: if the replicas have different buffers.
        """
        shapes = {f"the shape of buffer {name}": list(buffer.shape) for name, buffer in self._named().items()}
        agree(transport, shapes, remedies=dict.fromkeys(shapes, "leave buffers='average' out"))
        names = {name for changed in share(transport, self.changed(), list[str]) for name in changed}
        buffers = [buffer for name, buffer in self._named().items() if name in names]
        if not buffers:
            return
        own_B = torch.cat([buffer.reshape(-1).to("cpu", torch.float64) for buffer in buffers])
        sent = swap(transport, own_B.numpy().tobytes())
        total_B = torch.zeros_like(own_B)
        for message in sent:  # in the order of the replicas
            total_B += torch.frombuffer(bytearray(message), dtype=torch.float64)
        for buffer, part_B in zip(buffers, (total_B / len(sent)).split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(part_B.view(buffer.shape))


def _as_fp32(values: Tensor) -> Tensor:
    """The values as FP32, and an FP64 value as two of them, so that different buffers stay different."""
    return values.contiguous().view(torch.float32) if values.dtype == torch.float64 else values.float()
