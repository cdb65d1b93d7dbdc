from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diloco.models import language_model as module
from diloco.models.language_model import LanguageModel, cross_entropy


def plain(logits_RxV: Tensor, target_R: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The equation, on all logits in FP32."""
    logits_RxV = logits_RxV.float()
    log_z_R = logits_RxV.logsumexp(dim=-1)
    mean = (log_z_R - logits_RxV.gather(-1, target_R[:, None]).squeeze(-1)).mean()
    return mean, mean + z_loss * log_z_R.square().mean()


def case(num_rows: int, num_logits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    logits = 5 * torch.randn(num_rows, num_logits, generator=generator)
    return logits.to(dtype), torch.randint(0, num_logits, (num_rows,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_logits"), [(1, 3), (57, 300), (16, 1024)])
@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.25, 0.0), (0.5, 1 / 3)])
def test_loss_and_gradient_have_the_bits_of_autograd(dtype, num_rows, num_logits, weights):
    logits, target = case(num_rows, num_logits, dtype)
    results = []
    with patch.object(module, "_LOGITS_AT_ONCE", 7 * num_logits + 1):  # the last piece is shorter
        for function in (plain, cross_entropy):
            x = logits.clone().requires_grad_()
            mean, objective = function(x, target, 0.01)
            sum(w * y for w, y in zip(weights, (mean, objective), strict=True) if w).backward()
            results.append((mean, objective, x.grad))
    assert results[0][2].dtype == dtype
    assert all(map(torch.equal, *results))


def test_a_gpu_has_kernels_where_triton_is_and_plain_torch_elsewhere(monkeypatch):
    class Cuda(torch.Tensor):
        is_cuda = True

    there, kernels = torch.empty(1, 1).as_subclass(Cuda), object()
    monkeypatch.setattr(module, "gpu_rows", lambda: kernels)
    assert module._rows(there) is kernels
    assert isinstance(module._rows(torch.empty(1, 1)), module._Pieces)
    monkeypatch.setattr(module, "gpu_rows", lambda: None)
    assert isinstance(module._rows(there), module._Pieces)


class Largest(TorchDispatchMode):
    """The largest FP32 result of an operation."""

    num_elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype == torch.float32]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def test_logits_are_never_all_in_fp32():
    logits, target = case(64, 8192, torch.bfloat16)
    with Largest() as largest:
        cross_entropy(logits.requires_grad_(), target, 1e-4)[1].backward()
    assert largest.num_elements <= 1 << 18 < logits.numel()


def test_loss_is_cross_entropy_and_z_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=generator, dtype=torch.float32)
    targets = torch.randint(0, 11, (2, 3), generator=generator)
    loss, objective = LanguageModel().loss(logits, targets, 0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(-1, 11), targets.view(-1)))
    torch.testing.assert_close(objective - loss, 0.1 * logits.exp().sum(-1).log().square().mean())
