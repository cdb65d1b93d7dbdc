"""Error feedback: what a codec loses of one outer gradient is sent with the next (arXiv 1901.09847).

Shapes: N elements of one fragment.
"""

from torch import Tensor

from diloco.outer.averages import Reduction
from diloco.outer.cohort import Cohort
from diloco.wire.payload import Key


def encode_with_feedback(
    reduction: Reduction,
    delta_N: Tensor,
    error_N: Tensor,
    beta: float,
    key: Key,
    cohort: Cohort,
    *,
    base: int = 0,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """e ← β e + Δ; send C(e); e ← e − C(e). The new e is right if what was sent enters an outer step.

    Args:
        reduction: how payloads are averaged; its codec is C.
        delta_N: Δ, flat FP32.
        error_N: e, flat FP32; zero at the start.
        beta: β.
        key: whose outer gradient it is.
        cohort: the members that share the fragment.
        base: as of `Reduction.encode`.

    Returns:
        The payloads, and the new e; nothing is changed in place.

    Raises:
        NonFiniteError: if β e + Δ is not finite.
    """
    error_N = beta * error_N + delta_N
    payloads = reduction.encode(error_N, key, cohort, base=base)
    return payloads, error_N.sub_(reduction.decode(payloads, error_N.numel(), key))
