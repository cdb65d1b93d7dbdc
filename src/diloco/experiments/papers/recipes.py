"""All experiments by name: every module of this package is imported, so that a new one needs no entry here."""

from importlib import import_module
from pkgutil import iter_modules

from diloco.errors import UserError, nearest
from diloco.experiments import papers
from diloco.experiments.papers.experiment import REGISTERED, Experiment, Recipe
from diloco.experiments.papers.tiers import Tier

for _module in iter_modules(papers.__path__):
    import_module(f"{papers.__name__}.{_module.name}")

EXPERIMENTS: dict[str, Recipe] = {
    name: recipe for name, (_, recipe) in sorted(REGISTERED.items(), key=lambda item: item[1][0])
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
    return EXPERIMENTS[name](tier)
