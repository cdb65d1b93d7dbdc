"""The outer rules and merge rules by name: one registry, from which spellings, checks and replays derive.

Before it stand the rules that change Δ, or the time at which it counts, and end in a step of `Nesterov`.

Shapes: N elements of one fragment, n of a part of it, M members, K directed parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from diloco.errors import UserError, nearest, setting
from diloco.outer.averages import Average, weigh_in
from diloco.outer.cohort import Cohort
from diloco.outer.merge import MERGE_RULES, MergeRule, Mixing
from diloco.outer.nesterov import DelayedNesterov, Nesterov
from diloco.outer.rule import FragmentState, OuterRule, Span
from diloco.outer.torch_optimizer import TORCH, TorchOptimizer, spelled_optimizer
from diloco.presets import DilocoSettings
from diloco.schedule import Sync
from diloco.schema import spelled
from diloco.wire.kernels.memory import elements_at_once


@dataclass(frozen=True, kw_only=True)
class RDA(Nesterov):
    """Per parameter D = (Σ_m w_m ‖D_m‖ / Σ_m w_m) · φ(Σ_m w_m φ(D_m)), φ(x) = x / ‖x‖, φ(0) = 0; then `Nesterov`.

    D is as long as the outer gradients are on average; their average is the shorter, the more they differ.
    Embeddings and vectors are averaged plainly. Source: Decoupled DiLoCo, arXiv 2604.21428. Public code takes the
    plain average where the directions cancel out; here D is 0 then, as the equation says.
    """

    plain: tuple[str, ...] = ("embed",)
    """Words: a parameter whose name has one of them is averaged plainly."""

    needs_deltas = True

    def gain(self, rho: float) -> None:
        """None: a step is no multiple of Δ and those before."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Make D in the place of the total, and take the outer step."""
        directed = [span for name, span in fragment.spans.items() if self._is_directed(name, span)]
        plain = [span for name, span in fragment.spans.items() if not self._is_directed(name, span)]
        for total_n in _pieces(average.total_N, plain):
            total_n.copy_(Average(total_n, average.weight).divided())
        if directed:
            self._direct(fragment, average, cohort, directed)
        super().on_average(fragment, Average(average.total_N, 1.0), sync, cohort)

    def _is_directed(self, name: str, span: Span) -> bool:
        return len(span.shape) > 1 and not any(word in name for word in self.plain)

    def _direct(self, fragment: FragmentState, average: Average, cohort: Cohort, directed: Sequence[Span]) -> None:
        """Write D of the directed parameters to the total, in two passes over the outer gradients."""
        squares_MxK = torch.stack([_squares(delta_N, directed) for delta_N in average.deltas()])
        norms_MxK = fragment.sum_over_shards(squares_MxK).sqrt()
        radius_K, total_N = torch.zeros_like(norms_MxK[0]), average.total_N
        members = zip(average.deltas(), norms_MxK, cohort.weights, strict=True)
        for index, (delta_N, norm_K, weight) in enumerate(members):
            weigh_in(radius_K, norm_K, weight, is_first=not index)
            for span, norm in zip(directed, torch.where(norm_K > 0, norm_K, torch.inf), strict=True):
                for total_n, delta_n in zip(_pieces(total_N, (span,)), _pieces(delta_N, (span,)), strict=True):
                    weigh_in(total_n, delta_n / norm, weight, is_first=not index)
        length_K = fragment.sum_over_shards(_squares(total_N, directed)).sqrt()
        factor_K = Average(radius_K, average.weight).divided() / torch.where(length_K > 0, length_K, torch.inf)
        for span, factor in zip(directed, factor_K, strict=True):
            for total_n in _pieces(total_N, (span,)):
                total_n.mul_(factor)


def _pieces(flat_N: Tensor, spans: Sequence[Span]) -> Iterator[Tensor]:
    """Views of some parameters' elements, as many at once as a device takes."""
    for span in spans:
        yield from span.of(flat_N).split(elements_at_once(flat_N.device))


def _squares(flat_N: Tensor, spans: Sequence[Span]) -> Tensor:
    """‖x‖² of each parameter (K), of this process's part."""
    return torch.stack([_sum_by_halves(span.of(flat_N).square()) for span in spans])


def _sum_by_halves(values_n: Tensor) -> Tensor:
    """Σ, and the memory is overwritten: one rounded addition per pair, in an order that no device chooses."""
    while (size := values_n.numel()) > 1:
        half = (size + 1) // 2
        values_n[: size - half].add_(values_n[half:])
        values_n = values_n[:half]
    return values_n.sum()


@dataclass(frozen=True, kw_only=True)
class Ties(Nesterov):
    """Per element D = the weighted mean of the D_m ≠ 0 with the sign of Σ_m w_m D_m; then `Nesterov`.

    Source: TIES-Merging, arXiv 2306.01708, which first keeps the largest fifth of each D_m: the codec
    `topk:density=0.2`. arXiv 2501.18512 tried that codec alone.
    """

    needs_deltas = True

    def gain(self, rho: float) -> None:
        """None: the step is not along Δ alone."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Make D in the place of the total, and take the outer step."""
        sign_N = average.total_N.sign()
        agreeing_N = torch.empty_like(sign_N)
        for index, (delta_N, weight) in enumerate(zip(average.deltas(), cohort.weights, strict=True)):
            agrees_N = (delta_N.sign() == sign_N) & (sign_N != 0)
            weigh_in(average.total_N, torch.where(agrees_N, delta_N, 0), weight, is_first=not index)
            weigh_in(agreeing_N, agrees_N.to(agreeing_N.dtype), weight, is_first=not index)
        average.total_N.div_(agreeing_N.clamp_(min=min(cohort.weights)))  # where nobody agrees the sum is 0
        super().on_average(fragment, Average(average.total_N, 1.0), sync, cohort)


@dataclass(frozen=True, kw_only=True)
class Eager(Nesterov):
    """Sent: a = D_m / M; v ← μ v + a; Θ ← Θ − η (a + μ v); θ ← Θ. Come: b = Δ − a; v ← v + b; Θ ← Θ − η (b + μ b).

    Together it is Nesterov's step with Δ, up to rounding, which differs between replicas, as Θ therefore does. In
    flight a replica trains from its own part of the step. Source: arXiv 2502.12996, where the others' part enters
    at the next send, since it is H steps in flight; here when it has come. Merge with `translate`.
    """

    slots = ("velocity", "own")
    shared = False
    merges_at_send = True

    def on_send(self, fragment: FragmentState, own: Callable[[], Tensor], sync: Sync, cohort: Cohort) -> None:
        """Take this replica's part of the outer step."""
        own_N = fragment.use("own")
        own_N.copy_(Average(own(), len(cohort.members)).divided())
        super().on_average(fragment, Average(own_N, 1.0), sync, cohort)

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the others' part."""
        others_N = average.divided().sub_(fragment.use("own"))
        fragment.use("velocity").add_(others_N)
        fragment.use("outer").sub_(self.rate(sync) * (others_N + self.momentum * others_N))


RULES: dict[str, type[OuterRule]] = {
    "nesterov": Nesterov,
    "rda": RDA,
    "ties": Ties,
    "delayed_nesterov": DelayedNesterov,
    "eager": Eager,
}
"""Every outer rule by its name; a rule is a frozen dataclass, whose fields are its settings."""
SHORT = {"sgd": "nesterov:momentum=0", "overwrite": "mix:alpha=0"}
"""Names for a rule with settings."""


def outer_rule(spec: str) -> OuterRule:
    """The outer rule of a spelling: a name with settings, or a torch optimizer with its own.

    Raises:
        UserError: naming the rules, or the settings of the rule, that exist.

    >>> outer_rule("nesterov:lr=0.7,momentum=0.9") == Nesterov(lr=0.7, momentum=0.9)
    True
    >>> outer_rule("torch.SGD:lr=0.5") == Nesterov(lr=0.5, momentum=0.0)
    True
    """
    name, spec = _full(spec)
    if name not in RULES and not name.startswith(TORCH):
        names = f"sgd, {', '.join(RULES)}, {TORCH}AdamW or another optimizer of torch.optim"
        raise UserError(f"{spec!r} is not an outer rule, which are {names}{nearest(name, RULES)}")
    with _option_errors():
        return spelled(RULES[name], spec) if name in RULES else spelled_optimizer(spec)


def rule_of_facts(name: str, facts: Mapping[str, Any]) -> OuterRule | None:
    """The outer rule of a class of diloco's own, from what its `facts` gave; None for another class.

    >>> rule_of_facts("Nesterov", Nesterov(lr=0.7).facts()) == Nesterov(lr=0.7)
    True
    """
    if name == TorchOptimizer.__name__:
        return TorchOptimizer.of_facts(facts)
    kinds = {kind.__name__: kind for kind in RULES.values()}
    return msgspec.convert(facts, kinds[name], strict=False) if name in kinds else None


def spelling_of(rule: OuterRule) -> str:
    """The name of a rule with η, μ and what is not the default; the class's name for a rule of one's own.

    >>> spelling_of(Nesterov())
    'nesterov:lr=0.4,momentum=0.9'
    """
    kinds = {kind: name for name, kind in RULES.items()}
    if type(rule) not in kinds:
        return str(rule.facts().get("class", type(rule).__name__))
    default = vars(type(rule)())
    shown = {name: x for name, x in vars(rule).items() if name in ("lr", "momentum") or x != default[name]}
    texts = [f"{name}={'+'.join(x) if isinstance(x, tuple) else x}" for name, x in shown.items()]
    return f"{kinds[type(rule)]}:{','.join(texts)}"


def merge_rule(spec: str) -> MergeRule:
    """The merge rule of a spelling: a name with settings.

    Raises:
        UserError: naming the merge rules, or the settings of one, that exist.

    >>> merge_rule("mix:alpha=0.5"), merge_rule("overwrite")
    (Mixing(alpha=0.5), Mixing(alpha=0.0))
    """
    name, spec = _full(spec)
    if name not in MERGE_RULES:
        names = ", ".join(("overwrite", *MERGE_RULES))
        raise UserError(f"{spec!r} is not a merge rule, which are {names}{nearest(name, MERGE_RULES)}")
    with _option_errors():
        rule = spelled(MERGE_RULES[name], spec)
    if rule == Mixing(1.0):
        raise UserError(f"{spec!r} keeps all of a replica's own parameters: no merge would change them")
    return rule


def _full(spec: str) -> tuple[str, str]:
    """The name of a rule, and a spelling that begins with it."""
    name, _, options = spec.partition(":")
    spec = ",".join(filter(None, (SHORT[name], options))) if name in SHORT else spec
    return spec.partition(":")[0], spec


@contextmanager
def _option_errors() -> Iterator[None]:
    """Name no field in a refusal of an option: the caller knows whose spelling it is."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error)) from None


def rules_of(settings: DilocoSettings) -> tuple[OuterRule, MergeRule]:
    """The outer rule and the merge rule that settings ask for.

    Raises:
        UserError: naming the setting.
    """
    with setting("diloco.outer", settings.outer_rule):
        outer = outer_rule(settings.outer_rule)
    with setting("diloco.merge", settings.merge_rule):
        return outer, merge_rule(settings.merge_rule)
