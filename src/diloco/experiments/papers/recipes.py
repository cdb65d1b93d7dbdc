"""All experiments by name."""

from collections.abc import Callable

from diloco.errors import UserError
from diloco.experiments.papers import laws, replicas, streaming
from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.papers.tiers import Tier

EXPERIMENTS: dict[str, Callable[[Tier], Experiment]] = {
    recipe.__name__: recipe
    for recipe in (
        streaming.scaling,
        streaming.overtraining,
        streaming.overlap,
        streaming.compression,
        streaming.fragment_size,
        streaming.freezing,
        replicas.num_replicas,
        replicas.sync_every,
        replicas.evaluated_parameters,
        replicas.slack,
        replicas.outer_cosine,
        laws.sync_cadence,
        laws.batch_size,
        laws.single_replica,
    )
}


def experiment(name: str, tier: Tier) -> Experiment:
    """One of them.

    Raises:
        UserError: naming those that there are.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"{name!r} is not an experiment: choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name](tier)
