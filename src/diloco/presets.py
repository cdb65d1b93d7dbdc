"""The methods of the papers by name: one meaning for trainer, simulator, planner and benchmarks; without torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["data_parallel", "diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4"]
"""data_parallel exchanges gradients at every step; the others, outer gradients, lead to the paper's best."""
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The settings that a method's name stands for; each may still be set by itself."""

    fragments: Literal["strided", "whole"]
    """How blocks form fragments."""
    overlap_steps: int
    """τ: inner steps between sending a fragment and merging it."""
    mixing: float
    """α: how much of its own parameters a replica keeps at a merge."""
    wire: str
    """The codec of the outer gradients."""


PRESETS: dict[Method, Preset] = {
    "diloco": Preset(fragments="whole", overlap_steps=0, mixing=0.0, wire="fp32"),
    "streaming": Preset(fragments="strided", overlap_steps=0, mixing=0.0, wire="fp32"),
    "streaming_overlapped": Preset(fragments="strided", overlap_steps=1, mixing=0.5, wire="fp32"),
    "streaming_overlapped_fp4": Preset(fragments="strided", overlap_steps=1, mixing=0.5, wire="e3m0"),
}
"""By method; data_parallel has no outer step, and so no preset."""
