"""Streaming DiLoCo (arXiv 2501.18512, Algorithm 1), whole, in plain torch; its replicas take turns in one process.

    python examples/algorithm.py

Symbols: replica m of M, fragment p of P, step t of T; θ a replica's parameters, Θ the outer parameters, Δ an outer
gradient; H the steps between two syncs of a fragment, τ the steps between its send and its merge, α the part of θ
that a merge keeps; η and μ the learning rate and the momentum of the outer step, v its velocity.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

# --8<-- [start:algorithm]
MAGNITUDES = torch.tensor([0.0, *(2.0**k for k in range(-6, 1))])  # what a sign and three bits of exponent hold
MIDPOINTS = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2


def e3m0(Δ: Tensor) -> Tensor:
    """decode(encode(Δ)): the nearest of the format's values, ties to the larger magnitude, in blocks of 256.

    A block's scale is the power of two that is nearest to its largest magnitude, and fits into one byte.
    """
    decoded = []
    for block in Δ.split(256):
        mantissa, exponent = math.frexp(block.abs().max())  # ½ ≤ mantissa < 1
        scale = 2.0 ** min(max(exponent - (mantissa < 0.75), -127), 127)
        code = torch.bucketize(block.abs() / scale, MIDPOINTS, right=True)
        decoded.append(MAGNITUDES[code].copysign(block) * scale)
    return torch.cat(decoded)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Replica:
    """A model and its inner optimizer; θ, Θ and v, lists over fragments; and this replica's τ."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, fragments: Sequence[Sequence[str]], τ: int
    ) -> None:
        self.model, self.optimizer, self.τ = model, optimizer, τ
        self.θ = [[model.get_parameter(name) for name in names] for names in fragments]
        self.Θ = [flat(θ_p) for θ_p in self.θ]
        self.v = [torch.zeros_like(Θ_p) for Θ_p in self.Θ]

    def outer_step(self, p: int, Δ: Tensor, η: float, μ: float) -> None:
        """SGD with Nesterov momentum; every operation is rounded to FP32 by itself."""
        self.v[p] = μ * self.v[p] + Δ
        self.Θ[p] = self.Θ[p] - η * (Δ + μ * self.v[p])

    @torch.no_grad()
    def merge(self, p: int, α: float) -> None:
        merged = α * flat(self.θ[p]) + (1 - α) * self.Θ[p]
        for tensor, part in zip(self.θ[p], merged.split([tensor.numel() for tensor in self.θ[p]]), strict=True):
            tensor.copy_(part.view_as(tensor))


def streaming_diloco(
    replicas: Sequence[Replica],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    T: int,
    H: int,
    α: float = 0.5,
    η: float = 0.4,
    μ: float = 0.9,
    encoded: Callable[[Tensor], Tensor] = e3m0,
    early: bool = False,
) -> Iterator[int]:
    """Train on loss(model, m, t), yielding each step t when it is done; the steps after T only receive.

    A fragment's first sync is at its first due step t ≥ H, or, if `early`, t ≥ 1.
    """
    M, P = len(replicas), len(replicas[0].θ)
    sent: dict[tuple[int, int], list[Tensor]] = {}  # by step and fragment: what all decode, a replica its own too
    for t in range(1, T + max(replica.τ for replica in replicas) + 1):
        if t <= T:
            for m, replica in enumerate(replicas):  # in parallel
                replica.optimizer.zero_grad()
                loss(replica.model, m, t).backward()  # lines 3 to 5
                replica.optimizer.step()
            for p in range(P):
                t_p = p * H // P
                if t >= (1 if early else H) and (t - t_p) % H == 0:  # lines 6 to 8
                    sent[t, p] = [encoded(replica.Θ[p] - flat(replica.θ[p])) for replica in replicas]
        for replica in replicas:
            for p in range(P):
                if (t - replica.τ, p) in sent:  # lines 9 to 12
                    Δ = sum(sent[t - replica.τ, p], start=torch.zeros(())) / M  # in the order of replicas
                    replica.outer_step(p, Δ, η, μ)
                    replica.merge(p, α)
        yield t


# --8<-- [end:algorithm]
def main() -> None:
    """Two replicas that merge after different τ, and three fragments, of which several are in flight at once."""
    target = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 4

    def loss(model: nn.Module, m: int, t: int) -> Tensor:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * m + t))
        return (model(x) - (x @ target).sin()).square().mean()

    replicas = []
    for τ in (5, 12):
        torch.manual_seed(1)  # the same initial parameters on every replica
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        fragments = [[f"{layer}.weight", f"{layer}.bias"] for layer in (0, 2, 4)]
        replicas.append(Replica(model, torch.optim.AdamW(model.parameters(), lr=3e-3), fragments, τ))
    for t in streaming_diloco(replicas, loss, T=200, H=20):
        if t % 40 == 0:
            held_out = [f"{loss(replica.model, 2, 0):.4f}" for replica in replicas]
            print(f"step {t}: held-out loss {held_out[0]} of replica 0, {held_out[1]} of replica 1")
    for m, replica in enumerate(replicas):
        print(f"replica {m}: outer hash {hashlib.sha256(flat(replica.Θ).numpy().tobytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
