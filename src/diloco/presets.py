"""The methods of the papers by name, and their settings, each declared once; no torch.

The outer rule `auto` stands for the learning rate and momentum that a fit of sweeps gives a run of known length.
"""

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


AUTO = "auto"
"""The name that stands for Nesterov's rule with these values."""
NO_AUTO_IN_A_STORE = (
    "{}=auto chooses by the number of replicas, which no replica knows where they come and go: give the rule "
    "itself, such as nesterov:lr=0.4,momentum=0.9"
)
"""The refusal, which names the setting."""
MOST_FITTED_REPLICAS = 4
"""The largest M of the sweeps."""
_MOST_GAIN, _MOST_MEMORY = 4.0, 4.5
_STEPS_PER_GAIN = 5.0
"""Inner steps that one above G = 1 needs between outer steps."""


def chosen(num_outer_steps: int, num_replicas: int, sync_every: int, mixing: float) -> tuple[float, float]:
    """η and μ of Nesterov's rule for R outer steps of each fragment, M replicas, H, and α (0 to below 1).

        G = 0.97 (min(R, 75)/30)^¼ (H/10)^¼ (M/2)^⅙;  n = 2.25 (R/30)^0.4, from 1 to 4.5
        g = min(4, G (1 − α) / (1 − α G));  η = g / n;  μ = 1 − 1/n

    Where a replica drifts by F between two outer steps, Θ moves by g Δ in sum, g = η / (1 − μ). A merge passes on
    1 − α of what Θ moved beyond F, so that α (g − 1) Δ is missing from the next outer gradient: if they go on as
    they are, Δ = F − α (g − 1) Δ, and Θ moves by G F with G = g / (1 + α (g − 1)). Momentum averages over n outer
    steps, which must be few beside R. In the sweeps the best G and n are the same for α = 0 and ½; the constants
    are fitted to R = 10 … 1,000, H = 5 … 100 and M = 1, 2, 4. There the rule ended 0.1 % above the best of a grid
    on average, 0.3 % at most in 40 of 41 cells, and 0.6 % in the last.

    >>> chosen(17, 2, 30, 0.0), chosen(17, 2, 30, 0.5)
    ((0.618, 0.442), (0.692, 0.442))
    """
    gain, memory = _best(num_outer_steps, num_replicas, sync_every)
    before_merges = _MOST_GAIN
    if mixing * gain < 1:
        before_merges = min(_MOST_GAIN, gain * (1 - mixing) / (1 - mixing * gain))
    return round(before_merges / memory, 3), round(1 - 1 / memory, 3)


def expected_excess(
    lr: float, momentum: float, num_outer_steps: int, num_replicas: int, sync_every: int, mixing: float
) -> float:
    """The part by which the loss is expected to lie above that of `chosen`: 0.025 ln²(G/G′) + 0.002 ln⁺(n/n′)².

    G and n are those of η and μ, n′ that of `chosen`, and G′ that of `chosen` times (n/n′)^0.2: the longer the
    memory, the larger the best gain; ln⁺ is 0 below 0. Where this was above 0.01 in the sweeps, the loss was 0.2
    to 4.7 % above, 2.1 % on average.

    >>> round(expected_excess(0.4, 0.9, 17, 2, 30, 0.0), 3), round(expected_excess(0.4, 0.9, 300, 2, 30, 0.5), 3)
    (0.028, 0.002)
    """
    best_gain, best_memory = _best(num_outer_steps, num_replicas, sync_every)
    memory = 1 / (1 - momentum)
    gain = _after_merges(lr * memory, mixing)
    longer = math.log(memory / best_memory)
    return 0.025 * (math.log(gain / best_gain) - 0.2 * longer) ** 2 + 0.002 * max(0.0, longer) ** 2


def warning_of_frequent(lr: float, momentum: float, sync_every: int, mixing: float) -> str | None:
    """A warning that outer steps follow each other too soon for their momentum; None if they don't.

    Successive outer gradients of a few inner steps point alike, since the inner optimizer has momentum, too: G, as
    in `chosen`, multiplies all that replicas learn, as a learning rate would. With η = 0.4, μ = 0.9 and M = 2 the
    loss at H = 1, 2, 5, 10 was 78, 51, 9 and 3 % above averaging's with α = 0, and at H = 2, 5, 10 6.3, 0.2 and
    −0.5 % with α = ½. The bound, H ≤ 5 (G − 1), lies between.

    >>> warning_of_frequent(0.4, 0.9, 4, 0.5), warning_of_frequent(1.0, 0.0, 1, 0.0)
    (None, None)
    """
    gain = _after_merges(lr / (1 - momentum), mixing)
    most = _STEPS_PER_GAIN * (gain - 1)
    if sync_every > most:
        return None
    return (
        f"outer steps every sync_every={sync_every} inner steps are too frequent for lr={lr:g} and "
        f"momentum={momentum:g}, which multiply what replicas learn by {gain:.3g}: in our runs the loss ended 3 "
        f"to 80 % higher; set outer=sgd:lr=1, outer=auto, or sync_every={int(most) + 1} or more"
    )


def _after_merges(gain: float, mixing: float) -> float:
    """G of g and α."""
    return gain / (1 + mixing * (gain - 1))


def _best(num_outer_steps: int, num_replicas: int, sync_every: int) -> tuple[float, float]:
    """G and n."""
    steps = max(1, num_outer_steps)
    gain = 0.97 * (min(steps, 75) / 30 * sync_every / 10) ** 0.25 * (num_replicas / 2) ** (1 / 6)
    gain = min(gain, 0.99 * (1 + sync_every / _STEPS_PER_GAIN))  # beyond the fit, up to where we would warn of it
    return gain, min(_MOST_MEMORY, max(1.0, 2.25 * (steps / 30) ** 0.4))
