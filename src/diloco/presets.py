"""The methods of the papers by name, with one meaning for trainer, simulator, planner and benchmarks; no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["data_parallel", "diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4"]
"""data_parallel reduces gradients at every step; the others lead from DiLoCo to Streaming DiLoCo, in order."""
METHODS: tuple[Method, ...] = get_args(Method)
"""The names of all methods."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The default settings of a method; each may still be set by itself."""

    fragments: Literal["strided", "whole"]
    """The pattern by which blocks form fragments: strided, or all parameters in one."""
    overlap_steps: int
    """τ: inner steps between sending a fragment and merging it."""
    mixing: float
    """α: the weight of a replica's own parameters at a merge."""
    wire: str
    """The codec of the outer gradients."""


PRESETS: dict[Method, Preset] = {
    "diloco": Preset(fragments="whole", overlap_steps=0, mixing=0.0, wire="fp32"),
    "streaming": Preset(fragments="strided", overlap_steps=0, mixing=0.0, wire="fp32"),
    "streaming_overlapped": Preset(fragments="strided", overlap_steps=1, mixing=0.5, wire="fp32"),
    "streaming_overlapped_fp4": Preset(fragments="strided", overlap_steps=1, mixing=0.5, wire="e3m0"),
}
"""Presets by method; data_parallel has no outer step, and so no preset."""
