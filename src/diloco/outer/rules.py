"""The outer rules and merge rules by name: one registry, from which spellings, checks and replays derive."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from diloco.errors import UserError, nearest, setting
from diloco.outer.eager import Eager
from diloco.outer.merge import MERGE_RULES, MergeRule, Mixing
from diloco.outer.nesterov import DelayedNesterov, Nesterov
from diloco.outer.rda import RDA
from diloco.outer.rule import OuterRule
from diloco.outer.ties import Ties
from diloco.outer.torch_optimizer import TORCH, TorchOptimizer, spelled_optimizer
from diloco.presets import DilocoSettings
from diloco.schema import from_spelling

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
        return from_spelling(RULES[name], spec) if name in RULES else spelled_optimizer(spec)


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
        rule = from_spelling(MERGE_RULES[name], spec)
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
