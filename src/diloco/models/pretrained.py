"""Models that others trained: their files, here or on the Hub; the classes of `transformers`; peft's adapters.

No torch, but where a function says so.
"""

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import FileError, UserError
from diloco.files import expanded, require
from diloco.hub import hub_file
from diloco.schema import read_json

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = ("model.safetensors", _INDEX := "model.safetensors.index.json")
"""Files of weights, in the order in which transformers looks for them."""


def config_file(name: str) -> tuple[Path, bool]:
    """The file of a model's config, and whether it is this machine's, not the Hub's."""
    path = expanded(name)
    sentence = (
        f"model.hf={name} is neither a directory with a config.json, nor such a file, nor the name of a model on "
        "the Hugging Face Hub"
    )
    if path.is_file():
        return path, True
    if path.exists():
        if not (path / "config.json").is_file():
            raise UserError(sentence, "model.hf")
        return path / "config.json", True
    try:
        downloaded = hub_file(name, ("config.json",))
    except UserError as error:
        raise UserError(f"{sentence}; {error}", "model.hf") from error
    if downloaded is None:
        raise UserError(sentence, "model.hf")
    return downloaded, False


def weight_files(hf: str) -> list[Path]:
    """The files of a model's weights; those of the Hub are downloaded if they are not here.

    Args:
        hf: the model's directory, or its name on the Hub.

    Raises:
        UserError: if they are gone.
    """
    folder = expanded(hf)
    hub = None if folder.exists() else hf
    try:
        first = _file(folder, hub, *WEIGHTS)
        names = [first.name]
        if first.name == _INDEX:
            index = read_json(first, dict[str, Any])
            names = sorted({str(shard) for shard in index.get("weight_map", {}).values()})
            if any(Path(shard).name != shard for shard in names):
                raise FileError(f"{first} can't be read: a shard lies outside of its directory")
        return [_file(folder, hub, shard) for shard in names]
    except UserError as error:
        raise UserError(f"model.hf={hf}: its weights can't be read: {error}", "model.hf") from error


def _file(folder: Path, hub: str | None, *names: str) -> Path:
    if hub is not None:
        downloaded = hub_file(hub, names)
        if downloaded is None:
            raise UserError("the directory is gone")
        return downloaded
    here = next((folder / name for name in names if (folder / name).is_file()), None)
    if here is None:
        raise UserError(f"{folder} has no {' or '.join(names)}")
    return here


@cache
def transformers_config(architecture: str) -> Any:
    """The config object of `transformers`; to be copied before it is changed.

    Raises:
        UserError: if `transformers` is not installed, does not know the model's type, or refuses a value.
    """
    require("transformers", extra="transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = json.loads(architecture)
    if (kind := values.get("model_type")) not in CONFIG_MAPPING:
        raise UserError(f"transformers knows no model_type={kind!r:.80} here: its config.json must name one")
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # each config checks itself, by errors of any class
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"transformers refuses its config.json: {reason}") from error


def text_config(config: Any) -> Any:
    """The part of a config that describes its language model."""
    return config.get_text_config()


@cache
def model_class(architecture: str) -> Any:
    """The class of `transformers` that computes a causal language model of this architecture.

    Raises:
        UserError: if there is none.
    """
    config = transformers_config(architecture)
    from transformers.models.auto import modeling_auto as auto

    # The types that fill in masked tokens read those that follow, too, but where they are told not to.
    reads_ahead = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    is_known = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_known or reads_ahead or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"a model of type {config.model_type} is no causal language model: choose another")
    return auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@contextmanager
def quiet() -> Iterator[None]:
    """Have `transformers` and peft say nothing but errors."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
