"""All experiments by name."""

from collections.abc import Callable

from diloco.experiments import laws, streaming
from diloco.experiments.experiment import Experiment
from diloco.experiments.tiers import Tier

EXPERIMENTS: dict[str, Callable[[Tier], Experiment]] = {
    recipe.__name__: recipe
    for recipe in (
        streaming.scaling,
        streaming.overtraining,
        streaming.overlap,
        streaming.compression,
        streaming.fragment_size,
        streaming.freezing,
        streaming.num_replicas,
        streaming.sync_every,
        streaming.evaluated_parameters,
        streaming.slack,
        streaming.outer_cosine,
        laws.sync_cadence,
        laws.batch_size,
        laws.single_replica,
    )
}


def experiment(name: str, tier: Tier) -> Experiment:
    """One of them.

    Raises:
        ValueError: naming those that there are.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"{name!r} is not an experiment: choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name](tier)
