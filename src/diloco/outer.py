"""The outer step and the merge, on flat FP32 vectors; pure.

Every line is one rounded operation an element, so that CPUs and GPUs, and NumPy, give the same bits: no fused
multiply-add, which some devices have and others not.

Shapes: N elements of one fragment.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from jaxtyping import Float32
from torch import Tensor

from diloco.native import native
from diloco.schedule import Sync

FlatFP32: TypeAlias = Float32[Tensor, "N"]
"""One fragment, flat; vectors in one call are equally long."""


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
            raise ValueError(f"the outer learning rate must be above 0 and finite, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum must be at least 0 and below 1, not {self.momentum}")

    def step(self, outer_N: FlatFP32, velocity_N: FlatFP32, delta_N: FlatFP32) -> tuple[FlatFP32, FlatFP32]:
        """The new Θ and v, FP32, from the averaged outer gradient Δ; nothing is changed in place."""
        velocity_N = self.momentum * velocity_N + delta_N
        return outer_N - self.lr * (delta_N + self.momentum * velocity_N), velocity_N


def divide(total_N: FlatFP32, divisor: int) -> FlatFP32:
    """An average from a sum, with the same bits on every device."""
    # Not by a Python number: CUDA would multiply by its reciprocal, which rounds differently.
    return total_N / torch.full((), divisor, dtype=torch.float32, device=total_N.device)


def merge(theta_N: FlatFP32, outer_N: FlatFP32, mixing: float) -> FlatFP32:
    """Θ mixed into a replica's parameters: α θ + (1 − α) Θ, FP32.

    >>> import torch
    >>> merge(torch.tensor([1.0]), torch.tensor([3.0]), mixing=0.5)
    tensor([2.])
    """
    return mixing * theta_N + (1 - mixing) * outer_N


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


@dataclass(frozen=True)
class OuterStep:
    """One outer step of one fragment, as this replica took it; it holds the payloads as long as it is kept."""

    sync: Sync
    """Fragment, round, and the step after which it was sent."""
    blocked_seconds: float
    """How long this replica waited for the others' payloads."""
    make_average: Callable[[], Tensor]
    """Makes Δ_p again from what the replicas sent."""
    make_deltas: Callable[[], Iterator[Tensor]]
    """Makes the replicas' decoded outer gradients again, one after the other."""
    spans: Mapping[str, tuple[int, int]]
    """Where each block of the fragment lies in these vectors: its first element, and the one after its last."""
    sum_over_shards: Callable[[Tensor], Tensor]
    """Adds up what every process of a sharded replica has found in its shard."""

    @cached_property
    def average(self) -> Tensor:
        """Δ_p, the average of the decoded outer gradients; flat FP32, made when it is first asked for."""
        return self.make_average()

    @cached_property
    def deltas(self) -> tuple[Tensor, ...]:
        """The decoded outer gradient of each replica, in replica order; flat FP32 of N elements.

        Decoded when they are first asked for; none with reduce_scatter, where no replica sees them whole.
        """
        return tuple(self.make_deltas())

    def norm(self) -> float:
        """‖Δ_p‖₂, over all shards; every process of a sharded replica must call it."""
        return self.sum_over_shards(self.average.square().sum()).sqrt().item()

    def mean_cosine(self, block: str | None = None) -> float | None:
        """Mean cosine over pairs of replicas, of the whole fragment or of one block; None if there is no pair.

        (‖Σ_m u_m‖² − Σ_m ‖u_m‖²) / (M (M − 1)) with u_m = Δ_m / ‖Δ_m‖, so that two vectors are in memory however
        many replicas there are. Over all shards: every process of a sharded replica must call it.
        """
        return (self._cosine if block is None else self._block_cosines)[block]

    @cached_property
    def _cosine(self) -> dict[str | None, float | None]:
        return self._cosines({None: (0, None)})

    @cached_property
    def _block_cosines(self) -> dict[str | None, float | None]:
        return self._cosines({**self.spans})

    def _cosines(self, spans: Mapping[str | None, tuple[int, int | None]]) -> dict[str | None, float | None]:
        """Of several parts, in two passes over the replicas."""
        parts = [slice(*span) for span in spans.values()]
        squares = [torch.stack([delta_N[p].square().sum() for p in parts]) for delta_N in self.make_deltas()]
        if len(squares) < 2:
            return dict.fromkeys(spans)
        norms_MxP = self.sum_over_shards(torch.stack(squares)).sqrt()
        sums = [torch.zeros(()) for _ in parts]
        for delta_N, norms_P in zip(self.make_deltas(), norms_MxP.clamp(min=1e-30), strict=True):
            sums = [sum_N + delta_N[p] / norm for sum_N, p, norm in zip(sums, parts, norms_P, strict=True)]
        all_pairs_P = self.sum_over_shards(torch.stack([sum_N.square().sum() for sum_N in sums]))
        num_pairs = len(squares) * (len(squares) - 1)
        cosines_P = (all_pairs_P - norms_MxP.count_nonzero(0)) / num_pairs
        return dict(zip(spans, cosines_P.tolist(), strict=True))


def parameters_hash(parameters: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = Tensor.detach) -> str:
    """SHA-256 of the parameters' FP32 bits, in the order of their names; of what `gather` makes of each."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(gather(parameters[name]).detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()
