"""A run's token budget as people say it, and its rounding to whole steps."""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from diloco.errors import UserError
from diloco.training.config import TrainConfig

Unit = Literal["tokens", "tokens a parameter", "epochs"]

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Budget:
    """An amount of training, which the model's size or the text may have to turn into tokens.

    >>> str(Budget(20.0, "tokens a parameter")), str(Budget(1e6, "tokens"))
    ('20 tokens a parameter', '1,000,000 tokens')
    """

    amount: float
    unit: Unit

    def __str__(self) -> str:
        return f"{self.amount:{',.0f' if self.unit == 'tokens' else '.10g'}} {self.unit}"

    def num_tokens(self, config: TrainConfig, epoch_tokens: int) -> float:
        """The tokens that this is for a config whose vocabulary is known, and text of so many tokens an epoch."""
        unit_tokens = {"tokens": 1, "tokens a parameter": config.model.num_matrix_params, "epochs": epoch_tokens}
        return self.amount * unit_tokens[self.unit]


def parse_tokens(text: str) -> Budget:
    """The budget that a text names: a number of tokens, or a multiple of the parameters.

    Raises:
        UserError: if it is neither.

    >>> parse_tokens("1.5M"), parse_tokens("20x")
    (Budget(amount=1500000.0, unit='tokens'), Budget(amount=20.0, unit='tokens a parameter'))
    """
    match = re.fullmatch(
        r"([0-9][0-9_,]*(?:\.[0-9]*)?(?:e\+?[0-9]{1,3})?)([kmgbtx]?)", text.strip(), re.IGNORECASE
    )
    if match is None:
        raise UserError(
            f"num_tokens={text} is no number of tokens: take one such as 1000000, 1e6 or 1M, or 20x for 20 tokens "
            "a parameter",
            "num_tokens",
        )
    amount, unit = float(match[1].replace(",", "")), match[2].lower()
    if unit == "x":
        return _checked("num_tokens", text, Budget(amount, "tokens a parameter"))
    return _checked("num_tokens", text, Budget(amount * _FACTORS[unit], "tokens"))


def epochs(number: float) -> Budget:
    """The budget of so many passes over the training text.

    Raises:
        UserError: if it is not above 0.
    """
    return _checked("epochs", number, Budget(number, "epochs"))


def _checked(field: str, value: object, budget: Budget) -> Budget:
    if not 0 < budget.amount < math.inf:
        raise UserError(f"{field}={value} must be above 0 and finite", field)
    return budget


def with_budget(config: TrainConfig, budget: Budget, *, epoch_tokens: int) -> TrainConfig:
    """The config with a budget of whole steps, as near as possible.

    Args:
        config: with its vocabulary.
        budget: as asked for.
        epoch_tokens: tokens of one pass over the training text.

    Raises:
        UserError: if the nearest is no step at all.
    """
    num_tokens, per_step = budget.num_tokens(config, epoch_tokens), config.tokens_per_step
    if num_tokens > _MOST_TOKENS:
        raise UserError(f"num_tokens of {num_tokens:.3g} are more than any run can take", "num_tokens")
    num_steps = round(num_tokens / per_step)
    if not num_steps:
        raise UserError(
            f"{budget} are less than half a step of global_batch·sequence_length={per_step} tokens: take a larger "
            "num_tokens",
            *("num_tokens", "global_batch", "sequence_length"),
        )
    return replace(config, num_tokens=num_steps * per_step)


_MOST_TOKENS = 2.0**60
