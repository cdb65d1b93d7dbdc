"""The papers' experiments by name: a file per paper, and one for the rules and optimizers of several."""

from collections.abc import Callable

from diloco.errors import UserError, nearest
from diloco.experiments.papers import laws, rules, streaming
from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.papers.tiers import Tier

EXPERIMENTS: dict[str, Callable[[Tier], Experiment]] = {
    recipe.__name__: recipe for recipe in (*streaming.EXPERIMENTS, *laws.EXPERIMENTS, *rules.EXPERIMENTS)
}
"""The experiments by name, in the order of the papers."""


def experiment(name: str, tier: Tier) -> Experiment:
    """The experiment of that name at a tier.

    Raises:
        UserError: if there is none; the message names those that there are.
    """
    if name not in EXPERIMENTS:
        hint = nearest(name, EXPERIMENTS) or f": choose from {', '.join(EXPERIMENTS)}"
        raise UserError(f"{name!r} is not an experiment{hint}")
    recipe = EXPERIMENTS[name]
    return recipe(tier.of_laws or tier if recipe in laws.EXPERIMENTS else tier)
