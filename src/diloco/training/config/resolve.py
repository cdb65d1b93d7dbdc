"""From the settings asked for to the settings that run: values that follow from others are filled in."""

import json
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from diloco.auto import AUTO, NO_AUTO_IN_A_STORE, chosen
from diloco.data.config import DataConfig
from diloco.data.shards import INDEX_FILE, MOST_TOKENS, read_index, total
from diloco.errors import FileError, UserError, nearest, setting
from diloco.files import expanded, memory_bytes
from diloco.models.spec import ModelConfig
from diloco.presets import METHODS, own_settings
from diloco.schema import Count, flat, read_bytes, without_format
from diloco.training.config.config import (
    FORMAT,
    OptimizerConfig,
    TrainConfig,
    differences_from_defaults,
    fields_with,
    from_json,
    is_within,
    to_json,
)
from diloco.training.config.recipes import RECIPES, recipe, with_hugging_face
from diloco.units import count


def check_sizes(config: TrainConfig, *, here: bool) -> None:
    """Compare the model's parameters, a batch and its logits with a machine's memory.

    These are lower bounds: optimizer, gradients and activations take several times as much.

    Args:
        config: with its vocabulary, as `resolve` fills it in.
        here: True compares with the memory of this machine, on which the run takes place; False with the largest
            that a machine may have.

    Raises:
        UserError: with the fields and the bytes that they ask for.
    """
    model, length = config.model, config.sequence_length
    micro_batch = config.micro_batch or config.process_batch
    needs = {
        ("sequence_length", "global_batch"): (8 * config.process_batch * (length + 1), "tokens of one step"),
        ("sequence_length", "micro_batch", "model.vocab_size"): (
            logit_bytes(config) * micro_batch * length * model.vocab_size,
            "logits of one pass",
        ),
        ("evaluation.batch", "sequence_length", "model.vocab_size"): (
            logit_bytes(config) * config.evaluation.batch * length * model.vocab_size,
            "logits of one batch of the evaluation",
        ),
    }
    check_model(model, here=here)
    values = {
        **{
            "model.vocab_size": model.vocab_size,
            "sequence_length": length,
            "global_batch": config.global_batch,
            "micro_batch": micro_batch,
        },
        **{"evaluation.batch": config.evaluation.batch},
    }
    for names, (num_bytes, content) in needs.items():
        _check({name: values[name] for name in names}, num_bytes, content, here=here)


def logit_bytes(config: TrainConfig) -> int:
    """Bytes of a logit; where a device decides on autocast, the fewer."""
    return 4 if config.precision == "fp32" else 2


def check_model(model: ModelConfig, *, here: bool) -> None:
    """Compare a model's parameters alone; arguments and errors as those of `check_sizes`."""
    values = {f"model.{name}": getattr(model, name) for name in model.size_fields}
    _check(values, model.least_bytes, "parameters", here=here)


def _check(values: Mapping[str, int | str], num_bytes: int, content: str, *, here: bool) -> None:
    memory = memory_bytes() if here else _LARGEST_MEMORY_BYTES
    whose = "this machine has" if here else "no machine has more than"
    if num_bytes > memory:
        asked = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(
            f"{asked}: the {content} alone take {num_bytes:,} bytes, and {whose} {memory:,} bytes of memory: "
            "choose smaller sizes",
            *sorted(values, key=lambda name: (isinstance(size := values[name], int) and size) or 0, reverse=True),
        )


_LARGEST_MEMORY_BYTES = 1 << 46

Unit = Literal["tokens", "tokens a parameter", "epochs"]


@dataclass(frozen=True)
class Budget:
    """An amount of training, which the model's size or the text may have to turn into tokens.

    >>> str(Budget(20.0, "tokens a parameter")), str(Budget(1e6, "tokens"))
    ('20 tokens a parameter', '1,000,000 tokens')
    """

    amount: float
    unit: Unit

    def __str__(self) -> str:
        return f"{self.amount:{',.0f' if self.unit == 'tokens' else '.10g'}} {self.unit}"

    def num_tokens(self, config: TrainConfig, epoch_tokens: int) -> float:
        """The tokens that this is for a config whose vocabulary is known, and text of so many tokens an epoch."""
        unit_tokens = {"tokens": 1, "tokens a parameter": config.model.num_matrix_params, "epochs": epoch_tokens}
        return self.amount * unit_tokens[self.unit]


def parse_tokens(text: str) -> Budget:
    """The budget that a text names: a number of tokens, or a multiple of the parameters.

    Raises:
        UserError: if it is neither.

    >>> parse_tokens("1.5M"), parse_tokens("20x")
    (Budget(amount=1500000.0, unit='tokens'), Budget(amount=20.0, unit='tokens a parameter'))
    """
    word = text.strip().lower()
    try:
        if word.split() != [word]:
            raise ValueError(word)
        is_relative = word.endswith("x")
        budget = Budget(count(word.removesuffix("x")), "tokens a parameter" if is_relative else "tokens")
    except ValueError:
        raise UserError(
            f"num_tokens={text} is no number of tokens: take one such as 1000000, 1e6 or 1M, or 20x for 20 tokens "
            "a parameter",
            "num_tokens",
        ) from None
    return _checked("num_tokens", text, budget)


def epochs(number: float) -> Budget:
    """The budget of so many passes over the training text.

    Raises:
        UserError: if it is not above 0.
    """
    return _checked("epochs", number, Budget(number, "epochs"))


def _checked(field: str, value: object, budget: Budget) -> Budget:
    if not 0 < budget.amount < math.inf:
        raise UserError(f"{field}={value} must be above 0 and finite", field)
    return budget


def with_budget(config: TrainConfig, budget: Budget, *, epoch_tokens: int) -> TrainConfig:
    """The config with a budget of whole steps, as near as possible.

    Args:
        config: with its vocabulary.
        budget: as asked for.
        epoch_tokens: tokens of one pass over the training text.

    Raises:
        UserError: if the nearest is no step at all.
    """
    num_tokens, per_step = budget.num_tokens(config, epoch_tokens), config.tokens_per_step
    if num_tokens > _MOST_TOKENS:
        raise UserError(f"num_tokens of {num_tokens:.3g} are more than any run can take", "num_tokens")
    num_steps = round(num_tokens / per_step)
    if not num_steps:
        raise UserError(
            f"{budget} are less than half a step of global_batch·sequence_length={per_step} tokens: take a larger "
            "num_tokens",
            *("num_tokens", "global_batch", "sequence_length"),
        )
    return replace(config, num_tokens=num_steps * per_step)


_MOST_TOKENS = 2.0**60


def with_method_values(config: TrainConfig) -> TrainConfig:
    """The same config with its method's values in the fields that were left out, and with the outer rule for auto.

    Raises:
        UserError: for auto with settings of a rule, or where replicas come and go.
    """
    config = replace(config, diloco=config.diloco.of_method(config.method))
    diloco = config.diloco
    if config.method == "data_parallel" or diloco.outer.partition(":")[0] != AUTO:
        return config
    if diloco.outer_rule != AUTO:
        raise UserError(
            f"diloco.outer=auto chooses lr and momentum, and {diloco.outer_rule} gives them: leave one out",
            *("diloco.outer", "diloco.outer_learning_rate", "diloco.outer_momentum"),
        )
    if config.rendezvous is not None and config.num_replicas == 1:
        raise UserError(
            f"{NO_AUTO_IN_A_STORE.format('diloco.outer')}, or num_replicas, how many must join before the start",
            *("diloco.outer", "num_replicas", "rendezvous"),
        )
    lr, momentum = chosen(*auto_facts(config))
    return replace(config, diloco=replace(diloco, outer=f"nesterov:lr={lr},momentum={momentum}"))


def auto_facts(config: TrainConfig) -> tuple[int, int, int, float]:
    """R, M, H and α of a config with its method's values, by which auto chooses."""
    from diloco.outer.rules import merge_rule  # with torch, which no other value needs

    diloco = config.diloco
    with setting("diloco.merge", diloco.merge_rule):
        alpha = merge_rule(diloco.merge_rule).facts().get("alpha", 0.0)
    assert isinstance(alpha, float), "it is a number"
    return config.num_steps // diloco.sync_every, config.num_replicas, diloco.sync_every, alpha


def resolve(config: TrainConfig, *, vocab_size: int, prepared: Path) -> TrainConfig:
    """The config with every value filled in that follows from the method, the tokenizer or the length of the run.

    A config that is resolved already stays as it is.

    Args:
        config: as asked for.
        vocab_size: of the tokenizer.
        prepared: directory of the prepared data.

    Raises:
        UserError: if the model's vocabulary is smaller than the tokenizer's, or much larger, if the warm-up does
            not end before the run or the decay, if there would be nothing to freeze, or for sizes beyond the
            memory.
    """
    model = config.model.fitted(vocab_size=vocab_size, sequence_length=config.sequence_length)
    config = with_method_values(config)
    num_steps = config.num_steps
    optimizer = _with_warmup(config.optimizer, _steps_left(config))
    if config.diloco.freeze and config.diloco.fragments == "whole":
        raise UserError(
            "diloco.freeze with diloco.fragments=whole freezes nothing: take strided or sequential",
            *("diloco.freeze", "diloco.fragments"),
        )
    resolved = replace(
        config,
        model=model,
        data=replace(config.data, prepared=prepared),
        checkpoint=replace(
            config.checkpoint,
            keep=config.default_keep if config.checkpoint.keep is None else config.checkpoint.keep,
        ),
        micro_batch=config.micro_batch or config.process_batch,
        optimizer=replace(
            optimizer,
            weight_decay=1 / num_steps if optimizer.weight_decay is None else optimizer.weight_decay,
        ),
    )
    check_sizes(resolved, here=False)
    return resolved


def resolved(asked: TrainConfig) -> TrainConfig:
    """The resolved config of a run whose text lies in `asked.data.prepared`.

    Raises:
        UserError: as `resolve`.
        FileError: if the text's index can't be read.
    """
    prepared = asked.data.prepared
    assert prepared is not None, "the text is prepared"
    return resolve(asked, vocab_size=text_facts(asked.data).vocab_size, prepared=prepared)


@dataclass(frozen=True)
class TextFacts:
    """The facts of a prepared text that identify it, and from which a config follows."""

    digest: str
    """`Index.digest`."""
    num_tokens: Count
    """Tokens of the training text, as far as it is read."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    """Number of tokens in its tokenizer's vocabulary."""
    tokenizer_digest: str
    """`Tokenizer.digest` of its tokenizer, which the regions of an outer run share."""

    @property
    def shared(self) -> dict[str, Any]:
        """The facts that all replicas of a run must share."""
        return {
            TOKENIZER_DIGEST: self.tokenizer_digest,
            DATA_DIGEST: self.digest,
            TRAIN_TOKENS: self.num_tokens,
        }


DATA_DIGEST = "digest of the data"
"""The shared fact that names a run's text."""
TOKENIZER_DIGEST = "digest of the tokenizer"
"""The shared fact that names the tokenizer of a run's text."""
TRAIN_TOKENS = "tokens of training text"
"""The shared fact that says how much of it is read."""


def text_facts(data: DataConfig) -> TextFacts:
    """The facts of the text that a run reads.

    Raises:
        UserError: if there is none.
        FileError: if its index can't be read.
    """
    assert data.prepared is not None, "the text is prepared"
    index = read_index(data.prepared)
    num_tokens = total(index.splits["train"]).num_tokens
    num_tokens = min(num_tokens, data.max_train_tokens or num_tokens)
    return TextFacts(index.digest, num_tokens, index.vocab_size, index.tokenizer_digest)


def _steps_left(config: TrainConfig) -> int:
    """The steps of the schedule's last phase."""
    start_step = config.optimizer.start_step
    if config.num_steps <= start_step:
        raise UserError(
            f"num_tokens={config.num_tokens} are {config.num_steps} steps, and the run has taken {start_step}: "
            f"take more than {start_step * config.tokens_per_step}",
            "num_tokens",
        )
    return config.num_steps - start_step


def _with_warmup(optimizer: OptimizerConfig, num_steps: int) -> OptimizerConfig:
    """The optimizer's settings with the warm-up that a phase of so many steps has where none is given."""
    if optimizer.warmup_steps is None:
        optimizer = replace(optimizer, warmup_steps=min(1000, num_steps // 10))
    warmup_steps = optimizer.warmup_steps
    assert warmup_steps is not None, "it was filled in"
    if warmup_steps >= num_steps:
        raise UserError(
            f"optimizer.warmup_steps={warmup_steps} leaves nothing of the run's {num_steps} steps: take fewer, or "
            "a larger num_tokens",
            *("optimizer.warmup_steps", "num_tokens"),
        )
    if optimizer.schedule == "wsd" and warmup_steps + optimizer.decay_fraction * num_steps > num_steps:
        raise UserError(
            f"optimizer.decay_fraction={optimizer.decay_fraction} of {num_steps} steps begins before the warm-up "
            f"of {warmup_steps} steps has ended: take a smaller one of the two",
            *("optimizer.decay_fraction", "optimizer.warmup_steps"),
        )
    return optimizer


def identity(config: TrainConfig) -> dict[str, Any]:
    """The fields that identify a run: those that differ from their defaults, by dotted name, as JSON values.

    A value that is the method's own, or the outer rule's, counts as the default. Incidental fields, such as the
    run's name, are left out, and so are those of `data`: text is known by its content, not by the place where it
    lies.
    """
    from diloco.outer.rules import outer_rule  # with torch

    incidental, own = fields_with(TrainConfig, "incidental"), own_settings(config.method)
    if config.diloco.outer != AUTO:
        facts = outer_rule(config.diloco.outer).facts()
        own |= {"outer_learning_rate": facts.get("lr"), "outer_momentum": facts.get("momentum")}
    left_out: dict[str, Any] = {name: None for name, value in own.items() if getattr(config.diloco, name) == value}
    config = replace(config, diloco=replace(config.diloco, **left_out))
    return {
        name: value
        for name, value in differences_from_defaults(config).items()
        if name not in incidental and not name.startswith("data.")
    }


def shared_facts(config: TrainConfig) -> dict[str, Any]:
    """The settings that all replicas of a run must share, by dotted name, as JSON; text is known by its digest."""
    return _facts(config, without=fields_with(TrainConfig, "own_to_a_replica"))


def facts_with_rendezvous(config: TrainConfig) -> dict[str, Any]:
    """The settings that replicas which come and go must share, by dotted name, as JSON."""
    replayed = {f"model.{name}" for name in config.model.replayed_fields}
    return _facts(config, without=names_with_rendezvous() - replayed)


def names_with_rendezvous() -> set[str]:
    """The dotted names of the settings in which replicas that come and go may differ."""
    kinds = ("incidental", "own_to_a_replica", "own_with_rendezvous", "may_change_on_resume")
    return {name for kind in kinds for name in fields_with(TrainConfig, kind)}


def _facts(config: TrainConfig, *, without: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in flat(to_json(config)).items() if not is_within(name, without)}


_MOST_BYTES = 1 << 20
"""Size of the largest file that is read: no config takes as much."""


def read_config_file(
    path: Path, name: str | None, *, rendezvous: str | None = None, followed: Mapping[str, Any] | None = None
) -> tuple[TrainConfig, Budget | None]:
    """A recipe's config with the fields that a file changes, and the budget where the file has one.

    Sections are those of the config, and `recipe` names the recipe. `num_tokens` may be a text such as "20x", and
    `epochs` may stand in its place. Of a run's `config.json` the name is left out, and the place of a text that is
    prepared on demand.

    Args:
        path: of the file, `.toml` or `.json`.
        name: of the recipe; None takes the file's.
        rendezvous: in the place of the file's; with either, num_replicas is 1 unless the file says otherwise.
        followed: num_replicas and method in the place of the file's, from which values of the recipe follow.

    Raises:
        FileError: if the file can't be read.
        UserError: for an unknown field or recipe, and for a value that the config refuses.
    """
    values = _read(path)
    own = values.pop("recipe", "") or None
    if own is not None and (not isinstance(own, str) or own not in RECIPES):
        raise UserError(f"{path}: there is no recipe {str(own)!r:.80}{nearest(str(own), RECIPES)}")
    if name and own and name != own:
        raise UserError(f"{path} changes the recipe {own}, not {name}: name that recipe, or none")
    if (chosen := name or own) is None:
        raise UserError(f"{path} names no recipe: name one of {', '.join(RECIPES)}, there or before the flags")
    budget = _budget(path, values)
    if rendezvous is not None:
        values = values | {"rendezvous": rendezvous}
    base = recipe(chosen, **_followed(values) | dict(followed or {}))
    if values.get("rendezvous") is not None:  # each command starts one replica
        values = {"num_replicas": 1} | values
    model = values.get("model")
    if isinstance(model, dict) and isinstance(model.get("hf"), str) and "family" not in model:
        base = with_hugging_face(base, model["hf"])
        values = values | {"model": {name: value for name, value in model.items() if name != "hf"}}
    config = from_json(TrainConfig, _merged(to_json(base), values, path), source=str(path))
    return (_anew(config) if path.suffix == ".json" else config), budget


def _followed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The method and the number of replicas of a file, where they can be such; the config refuses the others."""
    method, replicas = values.get("method"), values.get("num_replicas")
    asked = {"method": method} if method in METHODS else {}
    is_number = type(replicas) is int and replicas > 0 and values.get("rendezvous") is None
    return asked | ({"num_replicas": replicas} if is_number else {})


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".toml", ".json"):
        raise UserError(f"config={path}: name a .toml file, or a .json such as a run's config.json", "config")
    content = read_bytes(path, most_bytes=_MOST_BYTES)
    try:
        text = content.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} can't be read: {error}") from error
    if not isinstance(values, dict):
        raise FileError(f"{path} can't be read: it is no object")
    return without_format(values, FORMAT, source=str(path)) if "format" in values else values


def _budget(path: Path, values: dict[str, Any]) -> Budget | None:
    """The budget of a file, which is taken out of its values where the config has no field for it."""
    num_tokens, num_epochs = values.get("num_tokens"), values.pop("epochs", None)
    if num_epochs is not None and num_tokens is not None:
        raise UserError(f"{path} has num_tokens and epochs: leave one of them out")
    if num_epochs is not None:
        if not isinstance(num_epochs, int | float) or isinstance(num_epochs, bool):
            raise UserError(f"{path}: epochs={num_epochs!r:.80} is no number")
        return epochs(num_epochs)
    if isinstance(num_tokens, str | float):
        del values["num_tokens"]
        return parse_tokens(str(num_tokens))
    return Budget(num_tokens, "tokens") if isinstance(num_tokens, int) else None


def _merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], path: Path, where: str = "", names: Sequence[str] = ()
) -> dict[str, Any]:
    """A config's values with changes, section by section."""
    if where == "model." and "family" in changes:
        return dict(changes)  # a model of another family has other fields
    names = names or [*flat(base)]
    for name, value in changes.items():
        if name not in base:
            elsewhere = " or ".join(one for one in names if one.rpartition(".")[2] == name)
            near = f": did you mean {elsewhere}?" if elsewhere else nearest(name, base)
            raise UserError(f"{path}: there is no field {where}{name:.80}{near}")
        if isinstance(base[name], Mapping) != isinstance(value, Mapping):
            raise UserError(f"{path}: {where}{name} is {'no' if isinstance(value, Mapping) else 'a'} section")
    return {
        name: _merged(value, changes[name], path, f"{where}{name}.", names)
        if isinstance(value, Mapping) and name in changes
        else changes.get(name, value)
        for name, value in base.items()
    }


def _anew(config: TrainConfig) -> TrainConfig:
    """The config of a run as another run begins with it: without its name, its phases, and a text in the cache."""
    optimizer, prepared = config.optimizer, config.data.prepared
    if optimizer.start_step:
        optimizer = replace(optimizer, start_step=0, start_rate=0.0, warmup_steps=None)
    if prepared is not None:
        is_cached = prepared.parent == expanded(config.data.cache).absolute()
        prepared = prepared if not is_cached and (prepared / INDEX_FILE).is_file() else None
    return replace(config, name="", optimizer=optimizer, data=replace(config.data, prepared=prepared))
