"""Triton's kernels for rows of logits, interpreted on the CPU, against torch's autograd in FP64."""

from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from diloco.models import cross_entropy as module
from diloco.models.cross_entropy import cross_entropy
from diloco.wire.kernels import gpu

Z_LOSS = 0.01


def exact(logits_RxV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, objective and the objective's gradient, FP64."""
    x_RxV = logits_RxV.double().requires_grad_()
    log_z_R = x_RxV.logsumexp(dim=-1)
    mean = (log_z_R - x_RxV.gather(-1, target_R[:, None]).squeeze(-1)).mean()
    objective = mean + Z_LOSS * log_z_R.square().mean()
    return mean, objective, torch.autograd.grad(objective, x_RxV)[0]


def own(logits_RxV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x_RxV = logits_RxV.detach().requires_grad_()
    mean, objective = cross_entropy(x_RxV, target_R, Z_LOSS)
    return mean, objective, torch.autograd.grad(objective, x_RxV)[0]


def compare(num_rows: int, num_logits: int, dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    wide_RxW = (scale * torch.randn(num_rows, num_logits + 3, generator=generator)).to(dtype)
    for logits_RxV in (wide_RxW[:, 1:-2], wide_RxW[:, 1:-2].contiguous(), wide_RxW[:, 1:-2].mT.contiguous().mT):
        target_R = torch.randint(0, num_logits, (2 * num_rows,), generator=generator)[::2]
        target_R[0], target_R[-1] = 0, num_logits - 1
        mean, objective, gradient_RxV = own(logits_RxV, target_R)
        exact_mean, exact_objective, exact_RxV = exact(logits_RxV, target_R)
        fp32 = 2e-6 * max(1.0, logits_RxV.abs().max().item())
        assert mean.dtype == objective.dtype == torch.float32
        assert abs(mean - exact_mean) <= fp32
        assert abs(objective - exact_objective) <= fp32 * (1 + 2 * Z_LOSS * scale)
        assert gradient_RxV.dtype == dtype
        # Triton's interpreter cuts BF16 off, where a GPU rounds.
        rounding = torch.finfo(dtype).eps * (1.0 if dtype == torch.bfloat16 else 0.5)
        assert ((gradient_RxV.double() - exact_RxV).abs() <= rounding * exact_RxV.abs() + fp32 / num_rows).all()


def compare_what_is_not_finite() -> None:
    """The loss is not finite where NaN or +∞ goes in, or a target is no column; −∞ is a logit of probability 0."""
    logits_RxV, target_R = torch.zeros(2, 9), torch.tensor([3, 8])
    for place, value in product((0, 8), (torch.nan, torch.inf)):
        broken_RxV = logits_RxV.clone()
        broken_RxV[1, place] = value
        assert not own(broken_RxV, target_R)[0].isfinite()
    for target in (-100, -1, 9):
        mean, _, gradient_RxV = own(logits_RxV, torch.tensor([3, target]))
        assert mean.isnan()
        assert gradient_RxV.isnan().any(dim=-1).tolist() == [False, True]
    logits_RxV[:, :8] = -torch.inf
    mean, _, gradient_RxV = own(logits_RxV, torch.tensor([8, 8]))
    assert mean == 0
    assert gradient_RxV[:, :8].eq(0).all()


def main() -> None:
    with patch.object(module, "_rows", lambda logits_RxV: gpu.GpuRows()), patch.object(gpu, "_CHUNK", 8):
        dtypes = torch.float32, torch.bfloat16, torch.float16
        for (num_rows, num_logits), dtype in product([(1, 3), (2, 16), (3, 21)], dtypes):
            compare(num_rows, num_logits, dtype, scale=1.0 if num_rows == 2 else 30.0)
        compare_what_is_not_finite()
        torch.set_default_dtype(torch.bfloat16)
        compare(3, 21, torch.bfloat16, 1.0)
