"""The text of a run: its sources, its held-out part, and its tokenizer."""

import re
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from diloco.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text of a run; errors name its fields as `TrainConfig` does, `data.train`.

    Raises:
        UserError: if a field is out of its range, or two contradict each other.
    """

    train: tuple[str, ...] = ("stdlib",)
    """Sources of training text: `stdlib`, a file, glob or directory, or `hf:NAME[:CONFIG][:SPLIT]`."""
    weights: tuple[float, ...] = ()
    """Shares of the training text, in bytes, one per source of `train`: documents are then taken from the sources
    in turn, and the text ends with the first source that ends; empty reads one source after the other."""
    text_field: str = "text"
    """The field, or column, that holds the text of a row of `.jsonl`, `.csv`, `.parquet` or a dataset."""
    skip_null: bool = False
    """Leave out rows whose text is null, and say how many; otherwise such a row is refused."""
    held_out: tuple[str, ...] = ()
    """Sources of held-out text; where empty, a fraction of the training documents is held out."""
    held_out_fraction: float = 0.02
    """Share of the training documents that is held out, chosen by a hash of each document's id; where that would
    hold out none of them, or all, the same share at the end of each document."""
    max_train_bytes: int | None = None
    """Bytes of UTF-8 after which training text ends, with the document that reaches them; None is all text. With a
    vocabulary of 32,000, a token is four to five bytes of English."""
    max_train_tokens: int | None = None
    """Tokens of the prepared training text that a run reads, the first ones; None is all. One preparation serves
    runs of several sizes."""
    max_document_bytes: int = field(default=2**26, metadata={"may_change_on_resume": True})
    """Bytes of the longest document, and of the longest line of `.jsonl`; a longer one is refused.

    Reading a document takes a few times as much memory, tokenizing it about a hundred times.
    """
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the training split), a path (`tokenizer.json`, SentencePiece `.model`), or
    the name of a repository of the Hugging Face Hub, such as `gpt2`."""
    workers: int | None = field(default=None, metadata={"may_change_on_resume": True})
    """Processes that parse and tokenize text; None is one per core. The tokens are the same for any number."""
    prepared: Path | None = field(default=None, metadata={"may_change_on_resume": True})
    """A directory made by `diloco data prepare`, to be read in place of the sources above."""
    cache: Path = Path("data")
    """Directory in which sources are prepared on demand, each choice of settings in a directory of its own."""

    def __post_init__(self) -> None:
        if not self.train:
            raise UserError("data.train names no source of training text: name one, such as stdlib", "data.train")
        if self.weights and (len(self.weights) != len(self.train) or not all(0 < w < inf for w in self.weights)):
            raise UserError(
                f"data.weights={as_typed(self.weights)} must be one number above 0 per source of "
                f"data.train={as_typed(self.train)}",
                *("data.weights", "data.train"),
            )
        if self.workers is not None and self.workers < 1:
            raise UserError(f"data.workers={self.workers} must be at least 1", "data.workers")
        if self.text_field in ("", "id"):
            raise UserError(
                f"data.text_field={self.text_field!r} names no text: name the field that holds it",
                "data.text_field",
            )
        if not 0 < self.held_out_fraction < 1:
            raise UserError(
                f"data.held_out_fraction={self.held_out_fraction} must lie between 0 and 1",
                "data.held_out_fraction",
            )
        if self.max_train_bytes is not None and self.max_train_bytes < 1:
            raise UserError(
                f"data.max_train_bytes={self.max_train_bytes} must be at least 1: leave it out to read all text",
                "data.max_train_bytes",
            )
        if self.max_train_tokens is not None and self.max_train_tokens < 1:
            raise UserError(
                f"data.max_train_tokens={self.max_train_tokens} must be at least 1: leave it out to read all",
                "data.max_train_tokens",
            )
        if not 1 <= self.max_document_bytes <= 2**31 - 1:
            raise UserError(
                f"data.max_document_bytes={self.max_document_bytes} must be at least 1 and below 2^31",
                "data.max_document_bytes",
            )
        # Nine digits: a size fits the library's 32 bits.
        if self.tokenizer.startswith("bpe:") and not re.fullmatch("bpe:[0-9]{1,9}", self.tokenizer):
            raise UserError(
                f"data.tokenizer={self.tokenizer} is not of the form bpe:SIZE, such as bpe:8192", "data.tokenizer"
            )
        if self.held_out and self.held_out_fraction != DataConfig.held_out_fraction:
            raise UserError(
                f"data.held_out_fraction={self.held_out_fraction} contradicts "
                f"data.held_out={as_typed(self.held_out)}: name held-out sources or a fraction of the training "
                "documents, not both",
                "data.held_out_fraction",
                "data.held_out",
            )


def as_typed(value: object) -> str:
    """A setting's value as it stands on a command line, sources one after another.

    >>> as_typed(("a.txt", "b.txt"))
    'a.txt b.txt'
    """
    return " ".join(map(str, value)) if isinstance(value, tuple) and value else str(value)
