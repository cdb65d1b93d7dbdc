"""The methods of the papers by name, and their settings, each declared once; no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

from diloco.errors import UserError
from diloco.schedule import Timing

Method = Literal["data_parallel", "diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4"]
"""data_parallel reduces gradients at every step; the others lead from DiLoCo to Streaming DiLoCo, in order."""
METHODS: tuple[Method, ...] = get_args(Method)
"""The names of all methods."""


@dataclass(frozen=True, kw_only=True)
class DilocoSettings(Timing):
    """The settings of DiLoCo and Streaming DiLoCo, which torchtitan's section has, too."""

    fragments: Literal["strided", "sequential", "whole"] | None = field(default=None, metadata={"planned": True})
    """Pattern by which blocks form fragments; None is the method's own."""
    layers_per_fragment: int = field(default=3, metadata={"planned": True})
    """Blocks in a strided or sequential fragment."""
    outer: str = "nesterov"
    """Outer rule with its settings, such as nesterov, rda:lr=1,momentum=0 or torch.AdamW:lr=0.1; auto is nesterov,
    whose settings follow from the number of outer steps, M, H and α."""
    outer_learning_rate: float | None = field(default=None, metadata={"column": True})
    """η, the outer rule's lr; None is the rule's own."""
    outer_momentum: float | None = None
    """μ, the outer rule's momentum; None is the rule's own."""
    merge: str = "mix"
    """Merge rule: mix, overwrite or taylor, and for eager translate."""
    mixing: float | None = None
    """α of mix: how much of its own parameters a replica keeps at a merge; None is the method's own."""
    wire: str | None = field(default=None, metadata={"planned": True})
    """Codec of the outer gradients, such as e3m0, int8 or topk:density=0.05; None is the method's own."""
    combine: str = field(default="gather", metadata={"planned": True})
    """gather: each replica receives every other's payload. reduce_scatter: each averages a share and sends that,
    in the same codec or, as in reduce_scatter:bf16, another."""
    offload: bool = field(default=False, metadata={"may_change_on_resume": True})
    """Keep the outer parameters and momentum in pinned host memory, and fetch one fragment ahead."""
    error_feedback: float | None = None
    """β of error feedback, e ← β e + Δ, which sends later what the codec lost; None is no error feedback."""

    def __post_init__(self) -> None:
        """Refuse outer and merge rules with which nothing is trained together; the engine checks the rest."""
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        if rate is not None and not 0 < rate < math.inf:
            raise out_of_range("diloco.outer_learning_rate", "above 0 and finite", rate)
        if momentum is not None and not 0 <= momentum < 1:
            raise out_of_range("diloco.outer_momentum", "at least 0 and below 1", momentum)
        if self.mixing is not None and not 0 <= self.mixing < 1:
            raise out_of_range("diloco.mixing", "at least 0 and below 1", self.mixing)
        _ = self.outer_rule, self.merge_rule

    @property
    def outer_rule(self) -> str:
        """The spelling of the outer rule, η and μ included where they are settings of their own.

        Raises:
            UserError: if one is given twice, with both values.

        >>> DilocoSettings(sync_every=30, outer_momentum=0.8).outer_rule
        'nesterov:momentum=0.8'
        """
        return self._spelling("outer", {"outer_learning_rate": "lr", "outer_momentum": "momentum"})

    @property
    def merge_rule(self) -> str:
        """The spelling of the merge rule, α included where it is a setting of its own."""
        return self._spelling("merge", {"mixing": "alpha"})

    def _spelling(self, field: str, settings: Mapping[str, str]) -> str:
        """The spelling in a field, with the values of other fields as its options."""
        spelling: str = getattr(self, field)
        name, _, options = spelling.partition(":")
        named = {option.partition("=")[0] for option in options.split(",")}
        values = {setting: getattr(self, setting) for setting in settings}
        for setting, value in values.items():
            if value is not None and settings[setting] in named:
                raise UserError(
                    f"diloco.{field}={spelling} and diloco.{setting}={value} both give {settings[setting]}: leave "
                    "one out",
                    *(f"diloco.{setting}", f"diloco.{field}"),
                )
        added = [f"{settings[setting]}={value}" for setting, value in values.items() if value is not None]
        return f"{name}:{','.join(part for part in (options, *added) if part)}".removesuffix(":")

    def of_method(self, method: "Method") -> Self:
        """The same with the method's own values in the fields that were left out."""
        own = own_settings(method)
        if self.merge != "mix":
            own.pop("mixing", None)
        return replace(self, **{name: value for name, value in own.items() if getattr(self, name) is None})


def out_of_range(name: str, bounds: str, value: Any) -> UserError:
    """The refusal of a setting's value."""
    return UserError(f"{name} must be {bounds}, not {value}", name)


@dataclass(frozen=True, kw_only=True)
class Preset(DilocoSettings):
    """The settings of a method, which has a value for each that may be left out."""

    fragments: Literal["strided", "whole"] = field()
    mixing: float = field()
    wire: str = field()


PRESETS: dict[Method, Preset] = {
    "diloco": Preset(fragments="whole", overlap_steps=0, mixing=0.0, wire="fp32"),
    "streaming": Preset(fragments="strided", overlap_steps=0, mixing=0.0, wire="fp32"),
    "streaming_overlapped": Preset(fragments="strided", overlap_steps=1, mixing=0.5, wire="fp32"),
    "streaming_overlapped_fp4": Preset(fragments="strided", overlap_steps=1, mixing=0.5, wire="e3m0"),
}
"""Presets by method; data_parallel has no outer step, and so no preset."""


def own_settings(method: Method) -> dict[str, Any]:
    """The values of a method for the fields that may be left out; data_parallel has none."""
    if method == "data_parallel":
        return {}
    values = {f.name: getattr(PRESETS[method], f.name) for f in fields(DilocoSettings) if f.default is None}
    return {name: value for name, value in values.items() if value is not None}
