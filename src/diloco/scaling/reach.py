"""The size at which models write coherent English, by what was published, and the time to train such a model."""

from typing import NamedTuple

from diloco.scaling.laws import TOKENS_PER_PARAM
from diloco.simulator.wall_clock import step_seconds


class Finding(NamedTuple):
    """A publication's finding about the text of models of a size."""

    num_params: float
    """Their parameters."""
    writes: str
    """Their text."""
    source: str
    """The publication."""


FINDINGS = (
    Finding(10e6, "fluent stories, if it learns from stories for small children", "arXiv 2305.07759"),
    Finding(125e6, "English that is rarely coherent beyond a few words", "arXiv 2305.07759"),
    Finding(1.5e9, "coherent paragraphs", "GPT-2, Radford et al. 2019"),
)
"""Findings about English text, by size. The first is about models below that size."""


def training_seconds(num_params: float, flops: float) -> float:
    """The time to train a model on 20 tokens per parameter.

    Args:
        num_params: N.
        flops: operations per second that training does, 6 per parameter and token.

    >>> training_seconds(1.5e9, 2.7e14)
    1000000.0
    """
    tokens = TOKENS_PER_PARAM * num_params
    return step_seconds(num_params=num_params, batch_tokens=tokens, num_chips=1, flops_per_chip=flops)
