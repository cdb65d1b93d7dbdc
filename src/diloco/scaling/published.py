"""What arXiv 2503.09799 prints: losses (Table 4), laws of the best batch (Table 9). M = 0 is Data-Parallel."""

NUM_PARAMS = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
LOSS: dict[int, tuple[float, ...]] = {
    0: (3.485, 3.167, 2.950, 2.784, 2.653, 2.460, 2.326),
    1: (3.482, 3.162, 2.943, 2.777, 2.645, 2.451, 2.317),
    2: (3.508, 3.182, 2.957, 2.788, 2.657, 2.464, 2.323),
    4: (3.554, 3.213, 2.981, 2.808, 2.673, 2.472, 2.332),
    8: (3.621, 3.265, 3.019, 2.841, 2.698, 2.493, 2.351),
}
"""By M, the best held-out loss at each of `NUM_PARAMS`."""

_BATCH_SEQUENCES: dict[int, tuple[float, float]] = {
    0: (0.22592, 0.281),
    1: (0.01361, 0.435),
    2: (0.00769, 0.479),
    4: (0.00535, 0.510),
    8: (0.01859, 0.455),
}
SEQUENCE_LENGTH = 2048


def batch_tokens(num_params: float, num_replicas: int) -> float:
    """The best global batch, A·N^α.

    The paper calls its unit tokens, but the law gives 76 at a billion parameters: read as sequences of 2,048.

    >>> round(batch_tokens(1e9, 0))
    156417
    """
    factor, exponent = _BATCH_SEQUENCES[num_replicas]
    return SEQUENCE_LENGTH * factor * num_params**exponent
