"""The outer step and the merge, on flat FP32 vectors; pure.

Every line is one rounded operation an element, so that CPUs and GPUs, and NumPy, give the same bits: no fused
multiply-add, which some devices have and others not.

Shapes: N elements of one fragment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.kernels.native import native
from diloco.outer.mixing import FlatFP32, merge


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum, as in torch.optim.SGD: v ← μ v + Δ; Θ ← Θ − η (Δ + μ v); v₀ = 0.

    η = 1 and μ = 0 replace the outer parameters by the replicas' average (Local SGD, FedAvg).

    >>> import torch
    >>> theta, zero = torch.ones(2), torch.zeros(2)
    >>> outer, velocity = Nesterov(lr=1.0, momentum=0.0).step(
    ...     torch.ones(2), torch.zeros(2), torch.full((2,), 0.25)
    ... )
    >>> outer
    tensor([0.7500, 0.7500])
    """

    lr: float = 0.4
    """η, the outer learning rate."""
    momentum: float = 0.9
    """μ, the outer momentum."""

    def __post_init__(self) -> None:
        """Refuse what can't train."""
        if not 0 < self.lr < math.inf:
            raise UserError(f"the outer learning rate must be above 0 and finite, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise UserError(f"the outer momentum must be at least 0 and below 1, not {self.momentum}")

    def step(self, outer_N: FlatFP32, velocity_N: FlatFP32, delta_N: FlatFP32) -> tuple[FlatFP32, FlatFP32]:
        """The new Θ and v, FP32, from the averaged outer gradient Δ; nothing is changed in place."""
        velocity_N = self.momentum * velocity_N + delta_N
        return outer_N - self.lr * (delta_N + self.momentum * velocity_N), velocity_N


def divide(total_N: FlatFP32, divisor: int) -> FlatFP32:
    """An average from a sum, with the same bits on every device."""
    # Not by a Python number: CUDA would multiply by its reciprocal, which rounds differently.
    return total_N / torch.full((), divisor, dtype=torch.float32, device=total_N.device)


def take_outer_step(
    outer_N: FlatFP32,
    velocity_N: FlatFP32,
    total_N: FlatFP32,
    *,
    divisor: int,
    outer: Nesterov,
    parameters: Sequence[Tensor],
    mixing: float,
) -> None:
    """The outer step and the merge of one fragment, in place.

    Δ = total/divisor; v and Θ as in `Nesterov`; θ ← α θ + (1 − α) Θ, rounded to its dtype.

    Args:
        outer_N: Θ_p.
        velocity_N: v_p.
        total_N: Σ_m Δ_{m,p}.
        divisor: M.
        outer: the outer optimizer.
        parameters: θ_{m,p}, tensor by tensor, N elements together.
        mixing: α.
    """
    sizes = [theta.numel() for theta in parameters]
    scalars = (divisor, outer.lr, outer.momentum, mixing, 1 - mixing)
    fast = native() if outer_N.device.type == "cpu" and type(outer) is Nesterov else None
    vectors = (outer_N.split(sizes), velocity_N.split(sizes), total_N.split(sizes))
    for theta, outer_part, velocity_part, total_part in zip(parameters, *vectors, strict=True):
        if fast is not None and theta.dtype == torch.float32 and theta.is_contiguous():
            fast.outer_step([outer_part, velocity_part, total_part, theta], scalars)
        else:
            _outer_step_reference(outer_part, velocity_part, total_part, theta, divisor, outer, mixing)


def _outer_step_reference(
    outer_N: Tensor,
    velocity_N: Tensor,
    total_N: Tensor,
    theta: Tensor,
    divisor: int,
    outer: Nesterov,
    mixing: float,
) -> None:
    new_outer_N, new_velocity_N = outer.step(outer_N, velocity_N, divide(total_N, divisor))
    outer_N.copy_(new_outer_N)
    velocity_N.copy_(new_velocity_N)
    theta.copy_(merge(theta.reshape(-1).float(), outer_N, mixing).view(theta.shape))
