"""A run's identity: a digest of its settings and its text, the same wherever that text lies.

Only fields that differ from their defaults are digested, so that a new field renames no stored run.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diloco.data.config import DataConfig
from diloco.data.corpora import content, file_digest
from diloco.data.index import read_index
from diloco.data.tokenizers import is_file, tokenizer_file
from diloco.files import expanded, sha256
from diloco.training.config.config import TrainConfig, differences_from_defaults, fields_with
from diloco.training.config.resolve import identity


def run_name(config: TrainConfig) -> str:
    """The name of a run's directory, `run-` and a digest: equal for equal runs, whatever grid they belong to."""
    return f"run-{_digest(_facts(config))}"


def base_name(config: TrainConfig) -> str:
    """The name of a sweep's base, whose runs belong in one table: its digest leaves out fields with a column."""
    with_a_column = fields_with(TrainConfig, "column")
    return f"base-{_digest({name: value for name, value in _facts(config).items() if name not in with_a_column})}"


def _digest(facts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode())[:12]


def _facts(config: TrainConfig) -> dict[str, Any]:
    return {**identity(config), "data": _facts_of_data(config.data)}


def _facts_of_data(data: DataConfig) -> dict[str, Any]:
    """Text and tokenizer by their content, so that a copy elsewhere is the same and a changed file is not."""
    if data.prepared is not None:
        index = read_index(expanded(data.prepared))
        return {"prepared": index.digest, "tokenizer": index.tokenizer_digest}
    facts = differences_from_defaults(replace(data, cache=DataConfig.cache))
    if is_file(data.tokenizer):
        facts["tokenizer"] = file_digest(tokenizer_file(data.tokenizer))
    return facts | {name: [content(source) for source in getattr(data, name)] for name in ("train", "held_out")}


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """The same data, named so that any process on this machine finds it."""
    cache = data.cache.absolute()
    if data.prepared is not None:  # it names its sources as they were when it was made
        return replace(data, prepared=expanded(data.prepared).absolute(), cache=cache)
    tokenizer = data.tokenizer
    return replace(
        data,
        train=tuple(map(_absolute, data.train)),
        held_out=tuple(map(_absolute, data.held_out)),
        tokenizer=str(tokenizer_file(tokenizer).absolute()) if is_file(tokenizer) else tokenizer,
        cache=cache,
    )


def _absolute(source: str) -> str:
    return source if source == "stdlib" or source.startswith("hf:") else str(expanded(source).absolute())
