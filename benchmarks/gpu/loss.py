"""The loss: its error against FP64, and its time relative to a copy of the logits."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from diloco.models import language_model as module
from diloco.models.language_model import cross_entropy
from diloco.wire.kernels import gpu
from gpu.place import Measurements, Place, Row

GOAL = 0.7
_Z_LOSS = 1e-4


def measurements(place: Place) -> Measurements:
    return {
        "values": partial(_values, place),
        "ours": partial(_times, place, partial(cross_entropy, z_loss=_Z_LOSS), goal=GOAL),
        "ours, plain torch": partial(_in_pieces, place),
        "torch, FP32": partial(_times, place, _torch),
        "programs": partial(_programs, place),
    }


def _case(place: Place, rows: int) -> tuple[Tensor, Tensor]:
    """Logits as a decoder of the ladder has them in autocast, and targets."""
    generator = torch.Generator(place.device).manual_seed(0)
    num_logits = place.size(32_768, 300)
    logits = torch.randn(rows, num_logits, generator=generator, device=place.device).mul_(3).bfloat16()
    return logits, torch.randint(0, num_logits, (rows,), generator=generator, device=place.device)


def _values(place: Place) -> Row:
    """The errors of loss and gradient; half a unit in the last place of BF16 is 0.0039 of a value."""
    logits_RxV, target_R = _case(place, place.size(512, 8))
    x_RxV = logits_RxV.clone().requires_grad_()
    mean, objective = cross_entropy(x_RxV, target_R, _Z_LOSS)
    objective.backward()
    assert x_RxV.grad is not None
    exact_RxV = logits_RxV.double().requires_grad_()
    log_z_R = exact_RxV.logsumexp(dim=-1)
    exact = F.cross_entropy(exact_RxV, target_R)
    (exact + _Z_LOSS * log_z_R.square().mean()).backward()
    assert exact_RxV.grad is not None
    of_gradient = ((x_RxV.grad.double() - exact_RxV.grad).abs() / exact_RxV.grad.abs()).max().item()
    of_mean = abs(mean.item() / exact.item() - 1)
    return {"mean": of_mean, "gradient": of_gradient, "ok": of_mean < 1e-6 and of_gradient < 0.004}


def _torch(logits_RxV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a plain loop, without z-loss."""
    mean = F.cross_entropy(logits_RxV.float(), target_R)
    return mean, mean


def _times(place: Place, loss: Any, *, goal: float | None = None) -> Row:
    """Milliseconds, and the speeds over a copy's: forward reads the logits, backward reads and writes as many."""
    logits_RxV, target_R = _case(place, place.size(1 << 15, 8))
    x_RxV, copy_RxV = logits_RxV.requires_grad_(), torch.empty_like(logits_RxV)

    def whole() -> None:
        x_RxV.grad = None
        loss(x_RxV, target_R)[1].backward()

    copy = place.milliseconds(lambda: copy_RxV.copy_(x_RxV.detach()))
    forward, both = place.milliseconds(lambda: loss(x_RxV, target_R)), place.milliseconds(whole)
    backward = both - forward
    speeds = {"forward_of_copy": round(copy / 2 / forward, 3), "backward_of_copy": round(copy / backward, 3)}
    row: Row = {
        "copy_ms": round(copy, 3),
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        **speeds,
    }
    return row | {"ok": None if goal is None else place.goal(min(speeds.values()) >= goal)}


def _in_pieces(place: Place) -> Row:
    with patch.object(module, "gpu_rows", lambda: None):
        return _times(place, partial(cross_entropy, z_loss=_Z_LOSS))


def _programs(place: Place) -> Row:
    """Forward's and backward's speeds over a copy's, with other numbers of logits and warps a program."""
    row: Row = {}
    for chunk, warps in [
        (1024, 4),
        (2048, 4),
        (4096, 4),
        (4096, 8),
        (8192, 8),
        (8192, 16),
        (16384, 16),
        (32768, 32),
    ]:
        with patch.object(gpu, "_CHUNK", chunk), patch.dict(gpu._ROW_OPTIONS, num_warps=warps):
            times = _times(place, partial(cross_entropy, z_loss=_Z_LOSS))
        row[f"{chunk} logits, {warps} warps"] = times["forward_of_copy"], times["backward_of_copy"]
    return row
