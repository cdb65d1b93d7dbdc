"""The losses (Table 4) and power laws (Tables 7 to 10) of arXiv 2503.09799. M = 0 is Data-Parallel."""

from diloco.scaling.power_laws import PowerLaw

NUM_PARAMS = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
LOSS: dict[int, tuple[float, ...]] = {
    0: (3.485, 3.167, 2.950, 2.784, 2.653, 2.460, 2.326),
    1: (3.482, 3.162, 2.943, 2.777, 2.645, 2.451, 2.317),
    2: (3.508, 3.182, 2.957, 2.788, 2.657, 2.464, 2.323),
    4: (3.554, 3.213, 2.981, 2.808, 2.673, 2.472, 2.332),
    8: (3.621, 3.265, 3.019, 2.841, 2.698, 2.493, 2.351),
}
"""The best held-out loss at each of `NUM_PARAMS`, by M."""

LAWS: dict[str, dict[int, PowerLaw]] = {
    "loss": {
        0: PowerLaw(18.129, -0.0953),
        1: PowerLaw(18.363, -0.0961),
        2: PowerLaw(18.768, -0.0969),
        4: PowerLaw(19.762, -0.0992),
        8: PowerLaw(21.051, -0.1018),
    },
    "learning_rate": {
        0: PowerLaw(16319.2, -0.819),
        1: PowerLaw(74620.6, -0.945),
        2: PowerLaw(3978.82, -0.780),
        4: PowerLaw(4512.99, -0.789),
        8: PowerLaw(618986, -1.102),
    },
    "batch_tokens": {
        0: PowerLaw(0.22592, 0.281),
        1: PowerLaw(0.01361, 0.435),
        2: PowerLaw(0.00769, 0.479),
        4: PowerLaw(0.00535, 0.510),
        8: PowerLaw(0.01859, 0.455),
    },
}
"""Independent laws (Tables 7 to 9), by quantity and M; the batch in sequences of `SEQUENCE_LENGTH` tokens."""
JOINT = {
    "loss": PowerLaw(19.226, -0.0985, 0.0116),
    "learning_rate": PowerLaw(22256, -0.8827, 0.2929),
    "batch_tokens": PowerLaw(0.00709, 0.4695, 0.3399),
}
"""Joint laws (Table 10)."""
EXTRAPOLATED_PARAMS = (4e9, 10e9)
EXTRAPOLATED = {
    ("independent", 0): (2.224, 2.090),
    ("independent", 1): (2.229, 2.103),
    ("joint", 1): (2.219, 2.086),
    ("independent", 2): (2.218, 2.083),
    ("joint", 2): (2.220, 2.086),
    ("independent", 4): (2.232, 2.098),
    ("joint", 4): (2.230, 2.096),
}
"""Losses at those sizes with predicted hyperparameters (Tables 5 and 12), by whose prediction and M."""
SEQUENCE_LENGTH = 2048
SYNC_EVERY = 30


def method_name(num_replicas: int) -> str:
    """The name of M in tables and pictures.

    >>> method_name(0), method_name(2)
    ('Data-Parallel', 'DiLoCo, M = 2')
    """
    return f"DiLoCo, M = {num_replicas}" if num_replicas else "Data-Parallel"


def batch_tokens(num_params: float, num_replicas: int) -> float:
    """The best global batch, A·N^α.

    The paper calls its unit tokens, but its law gives 76 at a billion parameters: we read sequences of 2,048.

    >>> round(batch_tokens(1e9, 0))
    156417
    """
    return SEQUENCE_LENGTH * LAWS["batch_tokens"][num_replicas](num_params)
