"""The module of a model family: its base class, with the default loss, cross-entropy with z-loss.

The loss takes a few rows of logits at a time, so that logits are kept in their own dtype only. Every operation is
that of the plain equation, in its order: loss and gradient have the bits of torch's autograd. A GPU has kernels
for it, which read the logits once each way; their results differ from these by rounding only.

Shapes: B sequences, T tokens, V vocabulary, R rows, r of them at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diloco.errors import UserError
from diloco.wire.kernels.gpu import GpuRows, gpu_rows
from diloco.wire.kernels.memory import elements_at_once

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class Cache(Protocol):
    """A model's memory of the tokens that it has read in each of B sequences."""

    def select(self, rows_R: Tensor) -> "Cache":
        """A cache of R sequences, each a copy of one of the B."""
        ...


class LanguageModel(nn.Module):
    """Tokens to the logits of the next token."""

    blocks: nn.ModuleList
    """The transformer blocks, from which fragments are made and which are sharded one by one."""

    def forward(self, tokens_BxT: Tensor, cache: Any = None) -> Tensor:
        """The logits (B, T, V) of the next token at each position.

        Args:
            tokens_BxT: int64.
            cache: of this model's `new_cache`; the tokens then follow those read before, and are added to it.
        """
        raise NotImplementedError

    def new_cache(self) -> Cache | None:
        """An empty cache, with which text is written and zero-shot tasks are scored; None if there is none."""
        return None

    def parallelize(self, mesh: "DeviceMesh") -> None:
        """Cut the matrices over the processes of a mesh of one dimension, which compute on the same tokens.

        Every parameter is a DTensor on the mesh then; a family has it that `check_tensor_parallel` lets through.
        """
        raise NotImplementedError

    def loss(
        self, logits_BxTxV: Float[Tensor, "B T V"], targets_BxT: Int64[Tensor, "B T"], z_loss: float = 0.0
    ) -> tuple[Float32[Tensor, ""], Float32[Tensor, ""]]:
        """Mean cross-entropy in nats per token, to report, and the objective to train on, with the z-loss."""
        return cross_entropy(logits_BxTxV.flatten(0, -2), targets_BxT.flatten(), z_loss)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """A context without what a model does in training only, such as dropout."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def cross_entropy(logits_RxV: Tensor, target_R: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, nats, and the objective, cross-entropy + z_loss · mean((log Z)²); FP32 scalars.

    Args:
        logits_RxV: of any floating dtype; no copy of all of them is made in FP32.
        target_R: int64. A target that is no column raises a RuntimeError on a CPU; on a GPU the results are NaN.
        z_loss: the weight of (log Z)².

    Raises:
        UserError: if there is not one target, int64, for each row.
    """
    if target_R.dtype != torch.int64 or target_R.shape != logits_RxV.shape[:1]:
        raise UserError(
            f"logits {tuple(logits_RxV.shape)} need one int64 target for each row, and not {target_R.dtype} "
            f"{tuple(target_R.shape)}"
        )
    return _CrossEntropy.apply(logits_RxV, target_R, z_loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RxV: Tensor, target_R: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        log_z_R, target_logit_R = _rows(logits_RxV).log_sums(logits_RxV, target_R)
        ctx.save_for_backward(logits_RxV, target_R, log_z_R)
        ctx.z_loss = z_loss
        ctx.set_materialize_grads(False)
        mean = (log_z_R - target_logit_R).mean()
        return mean, mean + z_loss * log_z_R.square().mean()

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, of_mean: Tensor | None, of_objective: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        logits_RxV, target_R, log_z_R = ctx.saved_tensors
        both = [gradient for gradient in (of_mean, of_objective) if gradient is not None]
        if not both:
            return None, None, None
        of_row = torch.stack(both).sum() / len(target_R)
        of_log_z_R = of_row.expand(len(target_R))
        if of_objective is not None:
            of_log_z_R = of_log_z_R + of_objective * ctx.z_loss / len(target_R) * (2 * log_z_R)
        return _rows(logits_RxV).gradients(logits_RxV, target_R, log_z_R, of_log_z_R, -of_row), None, None


class _Pieces:
    """The functions of `GpuRows` in plain torch."""

    def log_sums(self, logits_RxV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
        log_zs, target_logits = [], []
        for logits_rxV, target_r in _pieces(logits_RxV, target_R):
            x_rxV = logits_rxV.float()
            log_zs.append(x_rxV.logsumexp(dim=-1))
            target_logits.append(x_rxV.gather(-1, target_r[:, None]).squeeze(-1))
        return torch.cat(log_zs), torch.cat(target_logits)

    def gradients(
        self, logits_RxV: Tensor, target_R: Tensor, log_z_R: Tensor, of_log_z_R: Tensor, of_target: Tensor
    ) -> Tensor:
        gradient_RxV = torch.empty_like(logits_RxV)
        rows = _pieces(logits_RxV, target_R, log_z_R, of_log_z_R, gradient_RxV)
        for logits_rxV, target_r, log_z_r, of_log_z_r, gradient_rxV in rows:
            x_rxV = (logits_rxV.float() - log_z_r[:, None]).exp_().mul_(of_log_z_r[:, None])
            x_rxV.scatter_add_(-1, target_r[:, None], of_target.expand(len(target_r), 1))
            gradient_rxV.copy_(x_rxV)
        return gradient_RxV


def _rows(logits_RxV: Tensor) -> GpuRows | _Pieces:
    return (gpu_rows() if logits_RxV.is_cuda else None) or _Pieces()


def _pieces(logits_RxV: Tensor, *others: Tensor) -> "zip[tuple[Tensor, ...]]":
    """The same rows of all tensors; on a CPU so few that a piece stays in the cache."""
    most = _LOGITS_AT_ONCE if logits_RxV.device.type == "cpu" else elements_at_once(logits_RxV.device)
    rows_at_once = max(1, most // logits_RxV.shape[-1])
    return zip(*(tensor.split(rows_at_once) for tensor in (logits_RxV, *others)), strict=True)


_LOGITS_AT_ONCE = 1 << 18
