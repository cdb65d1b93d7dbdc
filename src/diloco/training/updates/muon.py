"""Muon, for matrices."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.engine.parameters import gathered, local, own_place, sharded_like
from diloco.training.updates.update import State, Update


@dataclass(frozen=True, kw_only=True)
class Muon(Update):
    """Muon, as torch.optim.Muon has it, bit for bit, with its `adjust_lr_fn="match_rms_adamw"`.

    b ← b + (1 − μ) (g − b);  u = g + μ (b − g), without Nesterov u = b
    θ ← θ − η λ θ − 0.2 η √max(A, B) orthogonal(u)      for a matrix of A × B

    An orthogonal matrix has elements of about 1/√max(A, B), so that each update is 0.2 η in the root mean square,
    as AdamW's are (arXiv 2502.16982, section 2.2): a learning rate that suits AdamW suits Muon.

    Of a replica with shards each process gathers the whole u in bfloat16, and orthogonalizes it: nothing else is
    exchanged, and the processes' matrices are one, bit for bit.
    """

    momentum: float
    nesterov: bool
    ns_steps: int
    weight_decay: float

    def state(self, parameter: Tensor) -> State:
        """The momentum b."""
        return {"momentum_buffer": torch.zeros_like(parameter.detach())}

    def moved(self, parameter: Tensor, gradient: Tensor, state: State, learning_rate: float) -> list[Tensor]:
        """The class's equations."""
        momentum = state["momentum_buffer"].lerp(gradient, 1 - self.momentum)
        update = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        whole = orthogonal(gathered(sharded_like(update.bfloat16(), parameter)), self.ns_steps)
        direction = whole[own_place(parameter, part=False)]
        rate = learning_rate * 0.2 * math.sqrt(max(parameter.shape))
        decayed = local(parameter) * (1 - learning_rate * self.weight_decay)
        return [decayed.add_(direction, alpha=-rate), momentum]


def orthogonal(matrix: Tensor, num_steps: int) -> Tensor:
    """U Vᵀ of a matrix U S Vᵀ, nearly: the singular values come to lie about 1, most within 0.3 of it.

    Steps of the Newton-Schulz iteration X ← a X + (b G + c G²) X with G = X Xᵀ, in bfloat16, from X of norm 1;
    a, b and c are Keller Jordan's, which raise small singular values fast.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


_A, _B, _C = 3.4445, -4.7750, 2.0315
