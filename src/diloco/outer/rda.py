"""Radial-directional averaging as the outer rule: lengths and directions of outer gradients are averaged apart.

Shapes: N elements of one fragment, n of a part of it, M members, K directed parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.outer.averages import Average, weigh_in
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState, Span
from diloco.wire.kernels.memory import elements_at_once, empty, widest


@dataclass(frozen=True, kw_only=True)
class RDA(Nesterov):
    """Per parameter D = (Σ_m w_m ‖D_m‖ / Σ_m w_m) · φ(Σ_m w_m φ(D_m)), φ(x) = x / ‖x‖, φ(0) = 0; then `Nesterov`.

    D is as long as the outer gradients are on average; their average is the shorter, the more they differ.
    Embeddings and vectors are averaged plainly. Source: Decoupled DiLoCo, arXiv 2604.21428. Public code takes the
    plain average where the directions cancel out; here D is 0 then, as the equation says.
    """

    plain: tuple[str, ...] = ("embed",)
    """Words: a parameter whose name has one of them is averaged plainly."""

    needs_deltas = True

    def gain(self, rho: float) -> None:
        """None: a step is no multiple of Δ and those before."""

    def averaged(self, fragment: FragmentState, average: Average, cohort: Cohort) -> Average:
        """D, in the place of the total."""
        directed = [span for name, span in fragment.spans.items() if self._is_directed(name, span)]
        plain = [span for name, span in fragment.spans.items() if not self._is_directed(name, span)]
        for total_n in _pieces(average.total_N, plain):
            total_n.copy_(Average(total_n, average.weight).divided())
        if directed:
            self._direct(fragment, average, cohort, directed)
        return Average(average.total_N, 1.0)

    def _is_directed(self, name: str, span: Span) -> bool:
        return len(span.shape) > 1 and not any(word in name for word in self.plain)

    def _direct(self, fragment: FragmentState, average: Average, cohort: Cohort, directed: Sequence[Span]) -> None:
        """Write D of the directed parameters to the total, in two passes over the outer gradients."""
        squares_MxK = torch.stack([_squares(delta_N, directed) for delta_N in average.deltas()])
        norms_MxK = _lengths(fragment, squares_MxK, on=average.total_N.device)
        radius_K, total_N = torch.zeros_like(norms_MxK[0]), average.total_N
        members = zip(average.deltas(), norms_MxK, cohort.weights, strict=True)
        for index, (delta_N, norm_K, weight) in enumerate(members):
            weigh_in(radius_K, norm_K, weight, is_first=not index)
            for span, norm in zip(directed, torch.where(norm_K > 0, norm_K, torch.inf), strict=True):
                for total_n, delta_n in zip(_pieces(total_N, (span,)), _pieces(delta_N, (span,)), strict=True):
                    weigh_in(total_n, delta_n / norm, weight, is_first=not index)
        length_K = _lengths(fragment, _squares(total_N, directed), on=total_N.device)
        factor_K = Average(radius_K, average.weight).divided() / torch.where(length_K > 0, length_K, torch.inf)
        for span, factor in zip(directed, factor_K, strict=True):
            for total_n in _pieces(total_N, (span,)):
                total_n.mul_(factor)


def _pieces(flat_N: Tensor, spans: Sequence[Span]) -> Iterator[Tensor]:
    """Views of some parameters' elements, as many at once as a device takes."""
    for span in spans:
        yield from span.of(flat_N).split(elements_at_once(flat_N.device))


def _lengths(fragment: FragmentState, squares: Tensor, *, on: torch.device) -> Tensor:
    """‖x‖ on a device, FP32, from this process's ‖x‖²: FP64 and one rounding all but hide the shards."""
    return fragment.sum_over_shards(squares).sqrt().to(on, torch.float32)


def _squares(flat_N: Tensor, spans: Sequence[Span]) -> Tensor:
    """‖x‖² of each parameter, FP64 (K), of this process's part; on the CPU where a device has no FP64."""
    has_fp64 = widest(flat_N.device) is torch.float64
    device = flat_N.device if has_fp64 else torch.device("cpu")
    longest = max(span.of(flat_N).numel() for span in spans)
    squares_n = empty(min(longest, elements_at_once(flat_N.device)), torch.float64, device)

    def of_piece(x_n: Tensor) -> Tensor:
        piece_n = squares_n[: x_n.numel()].copy_(x_n.to(device))  # a device may have no FP64
        return _sum_by_halves(piece_n.mul_(piece_n))

    pieces = [torch.stack([of_piece(x_n) for x_n in _pieces(flat_N, (span,))]) for span in spans]
    return torch.stack([_sum_by_halves(sums_n) for sums_n in pieces])


def _sum_by_halves(values_n: Tensor) -> Tensor:
    """Σ, and the memory is overwritten: one rounded addition per pair, in an order that no device chooses."""
    while (size := values_n.numel()) > 1:
        half = (size + 1) // 2
        values_n[: size - half].add_(values_n[half:])
        values_n = values_n[:half]
    return values_n.sum()
