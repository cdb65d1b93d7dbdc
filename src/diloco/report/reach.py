"""The answer to why a small model's text makes no sense, and what it would take: for the terminal and the chat.

The size at which models write coherent English is what was published.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from diloco.models.decoder_config import DecoderConfig
from diloco.report.page import Table
from diloco.report.text import long_duration, rounded
from diloco.scaling.laws import TOKENS_PER_PARAM
from diloco.simulator.wall_clock import step_seconds
from diloco.training.config.config import TrainConfig
from diloco.training.hardware import DENSE_BF16_FLOPS


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


_GPU, _UTILIZATION = "RTX 4090", 0.4
_MOST_SECONDS = 100 * 365.25 * 86400
"""Time above which its number tells nothing."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Larger models: their text, and the time that it takes to train them."""

    this: str
    """A sentence about the run's own model."""
    table: Table
    about: str
    """The assumptions."""


def reach(config: TrainConfig, *, num_tokens: int, tokens_per_second: float | None) -> Reach | None:
    """The text of larger models than a run's, and the time to train them; None for one that began from weights.

    Args:
        config: the run's, resolved.
        num_tokens: tokens that it has read.
        tokens_per_second: of all its replicas; None if that is not known.
    """
    num_params = config.model.num_params
    larger = [finding for finding in FINDINGS if finding.num_params > num_params]
    if not isinstance(config.model, DecoderConfig) or not larger:
        return None
    own_flops = 6.0 * num_params * tokens_per_second if tokens_per_second else None
    gpu_flops = _UTILIZATION * DENSE_BF16_FLOPS[_GPU]
    speeds = {"time here": own_flops, f"time, {_GPU}": gpu_flops}
    known = {name: flops for name, flops in speeds.items() if flops is not None}
    rows = [
        [
            rounded(finding.num_params),
            *(_time(training_seconds(finding.num_params, flops)) for flops in known.values()),
            f"{finding.writes} ({finding.source})",
        ]
        for finding in larger
    ]
    return Reach(
        this=f"This model has {rounded(num_params)} parameters and has read {rounded(num_tokens)} tokens. "
        "What was published of larger ones:",
        table=Table(columns=["parameters", *known, "writes"], rows=rows),
        about=" ".join(filter(None, _assumptions(own_flops, gpu_flops))),
    )


def _time(seconds: float) -> str:
    return "over 100 years" if seconds > _MOST_SECONDS else long_duration(seconds)


def _assumptions(own_flops: float | None, gpu_flops: float) -> Iterator[str]:
    yield f"The times are for {TOKENS_PER_PARAM:g} tokens per parameter and 6 operations per token and parameter,"
    yield "" if own_flops is None else f"here at the {own_flops / 1e12:.2g} TFLOP/s that this run reached, and"
    yield f"on a GPU at {gpu_flops / 1e12:.0f} TFLOP/s, {_UTILIZATION:.0%} of its peak, which is assumed."
