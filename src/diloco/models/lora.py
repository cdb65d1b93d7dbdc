"""Low-rank adapters (LoRA, arXiv 2106.09685): their settings, and what peft makes of them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.errors import UserError
from diloco.files import require

if TYPE_CHECKING:
    from torch import nn

_OPTIONS = "rank=INTEGER, alpha=NUMBER, targets=NAME+NAME"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """W + (alpha / rank) · B A in the place of each weight W of the targets; B and A are trained, and W is not."""

    rank: int
    """Rows of A, and columns of B."""
    alpha: float
    """Scale of the adapters, times the rank."""
    targets: tuple[str, ...] = ()
    """Last names of the modules that get adapters; none means every linear one but the head."""


def parse_lora(text: str) -> Lora:
    """The settings that a text names: the rank, and where they differ from the defaults, alpha and targets.

    Raises:
        UserError: naming the options that exist.

    >>> parse_lora("rank=8")
    Lora(rank=8, alpha=16.0, targets=())
    >>> parse_lora("rank=4,alpha=4,targets=q_proj+v_proj").targets
    ('q_proj', 'v_proj')
    """
    options: dict[str, str] = {}
    for option in text.split(","):
        key, _, value = option.partition("=")
        if key not in ("rank", "alpha", "targets") or key in options:
            raise _refusal(text, f"{option!r} is not an option of it, or given twice")
        options[key] = value
    try:
        rank = int(options["rank"])
        alpha = float(options.get("alpha", 2 * rank))
    except (KeyError, ValueError):
        raise _refusal(text, "it needs a rank, and numbers for rank and alpha") from None
    targets = tuple(options["targets"].split("+")) if "targets" in options else ()
    if not (1 <= rank < 1 << 16 and 0 < alpha < math.inf and all(targets)):
        raise _refusal(text, "rank must be from 1 to 65535, alpha above 0, and no target empty")
    return Lora(rank=rank, alpha=alpha, targets=targets)


def _refusal(text: str, reason: str) -> UserError:
    return UserError(f"model.lora={text}: {reason} (it has: {_OPTIONS})", "model.lora")


def with_adapters(model: "nn.Module", text: str) -> Any:
    """The model of `transformers` as peft's, with adapters drawn by torch's generator; nothing else is trained.

    Raises:
        UserError: if peft is not installed, or the model has no such targets.
    """
    peft, lora = require("peft", extra="lora"), parse_lora(text)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[*lora.targets] or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        reason = str(error).splitlines()[0][:300]
        raise UserError(f"model.lora={text} does not suit the model: {reason}", "model.lora") from error
