"""The hyperparameters of a method at a size, by the published laws: the one place that recipes and tiers take.

The learning rate and the global batch are those of arXiv 2503.09799, Tables 8 to 10. The outer learning rate η
depends on M alone (its Finding 4), and its Figure 7 prints no numbers: they are those of our own sweep.
"""

import math
from typing import NamedTuple

from diloco.errors import UserError
from diloco.presets import Method
from diloco.scaling.laws import Kind
from diloco.scaling.power_laws import JOINT, LAWS, SEQUENCE_LENGTH, PowerLaw

OUTER_LEARNING_RATES = {1: 0.4, 2: 0.6, 4: 0.8}
"""The best η of DiLoCo by M in docs/results/sweep.csv; between them, and beyond, that of the next smaller M."""
STREAMING_OUTER_LEARNING_RATE = 0.4
"""η of arXiv 2501.18512, tuned for two replicas and kept for all its models."""


class Hyperparameters(NamedTuple):
    """The hyperparameters that follow from a method, N and M.

    >>> round(hyperparameters("data_parallel", 1.3e9).learning_rate, 5)
    0.00056
    """

    learning_rate: float
    """Peak of the inner learning rate."""
    batch_tokens: float
    """Tokens of a step over all replicas."""
    outer_learning_rate: float | None
    """η; None for Data-Parallel, which has no outer step."""

    def sequences(self, num_replicas: int, sequence_length: int) -> int:
        """The batch in sequences: for each replica the power of two that is nearest in the logarithm."""
        share = self.batch_tokens / sequence_length / num_replicas
        return num_replicas * nearest_power_of_two(share)


def nearest_power_of_two(number: float) -> int:
    """The power of two that is nearest in the logarithm, and at least 1.

    >>> nearest_power_of_two(90), nearest_power_of_two(91)
    (64, 128)
    """
    return 2 ** max(0, round(math.log2(number)))


def hyperparameters(
    method: Method, num_params: float, num_replicas: int = 1, *, fit: Kind | None = None
) -> Hyperparameters:
    """The hyperparameters of a method at N and M.

    Args:
        method: data_parallel has a law of its own; the others share those of DiLoCo.
        num_params: N, number of all parameters.
        num_replicas: M; it means nothing to data_parallel.
        fit: joint, one law for all M, or independent, the law of this M; None is independent where there is one.

    Raises:
        UserError: if there is no such law.
    """
    replicas = 0 if method == "data_parallel" else num_replicas
    rate, batch = (published_law(quantity, replicas, fit) for quantity in ("learning_rate", "batch_tokens"))
    if replicas == 0:
        outer = None
    elif method != "diloco" and replicas <= 2:
        outer = STREAMING_OUTER_LEARNING_RATE
    else:
        outer = outer_learning_rate(replicas)
    return Hyperparameters(
        rate(num_params, replicas or 1), SEQUENCE_LENGTH * batch(num_params, replicas or 1), outer
    )


def published_law(quantity: str, num_replicas: int, fit: Kind | None = None) -> PowerLaw:
    """The published law of learning_rate or batch_tokens; M = 0 is Data-Parallel.

    Raises:
        UserError: if there is none.
    """
    if fit == "joint" or (fit is None and num_replicas not in LAWS[quantity]):
        if num_replicas == 0:
            raise UserError("a joint law holds for DiLoCo, and not for Data-Parallel: take fit=independent", "fit")
        return JOINT[quantity]
    if num_replicas not in LAWS[quantity]:
        known = ", ".join(f"M = {m}" for m in LAWS[quantity])
        raise UserError(f"no published law is there for M = {num_replicas}: there are those for {known}", "fit")
    return LAWS[quantity][num_replicas]


def outer_learning_rate(num_replicas: int) -> float:
    """The outer learning rate of DiLoCo with M replicas, at least 1.

    >>> outer_learning_rate(3), outer_learning_rate(8)
    (0.6, 0.8)
    """
    return OUTER_LEARNING_RATES[max(m for m in OUTER_LEARNING_RATES if m <= num_replicas)]
