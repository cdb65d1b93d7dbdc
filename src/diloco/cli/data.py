"""`diloco data`: text, prepared for training."""

from pathlib import Path
from typing import Annotated

import tyro

from diloco.cli._command import choose
from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.shards import read_index, total
from diloco.errors import UserError
from diloco.report.terminal.screen import Screen
from diloco.report.terminal.training import preparation_progress

HELP = "prepare text for training: diloco data prepare --output DIRECTORY [--field value …]"
ORDER = 11


def run(arguments: list[str]) -> None:
    """Prepare the text that a command line names."""
    choose({"prepare": _prepare}, arguments, prog="diloco data")


def _prepare(output: Path, data: Annotated[DataConfig, tyro.conf.arg(name="")] = DataConfig()) -> None:  # noqa: B008
    """Tokenize text into memory-mapped shards; the same command continues after an interruption.

    Args:
        output: Directory to write to.
        data: The text and its tokenizer.
    """
    if data.prepared is not None or data.cache != DataConfig.cache or data.max_train_tokens is not None:
        raise UserError(
            "data.prepared, data.cache and data.max_train_tokens mean nothing here, where all text is prepared in "
            "output: leave them out, and give the last to diloco train",
            *("data.prepared", "data.cache", "data.max_train_tokens", "output"),
        )
    with preparation_progress(Screen(stderr=True)) as progress:
        prepare(data, output, progress=progress)
    index = read_index(output)
    for split, shards in index.splits.items():
        print(f"{split}: {total(shards).num_documents:,} documents, {total(shards).num_tokens:,} tokens")
    print(f"digest {index.digest}")
