"""The flags with which a run's model writes text, for `diloco generate` and `diloco chat`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError
from diloco.training.config.config import Parameters

if TYPE_CHECKING:
    from diloco.data.tokenizers import Tokenizer
    from diloco.models.writer import Writer


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Settings of the text to write."""

    max_tokens: int = 200
    """The most tokens to write at a time; the end of a document ends them before."""
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the likeliest token always."""
    top_k: int = 40
    """The number of the likeliest tokens from which each is drawn."""
    seed: int = 0
    """Seed of the draws."""
    parameters: Parameters = "outer"
    """outer: those that the replicas share; replica: replica 0's own; average: the mean of all replicas' own."""
    prepared: Path | None = None
    """Directory of the run's data, if it was moved, or the run is in a store."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens} must be at least 1", "max_tokens")

    def load(self, run: str) -> "tuple[Writer, Tokenizer]":
        """The model and the tokenizer of a run."""
        from diloco.training.records.finished import load_model

        model = load_model(run, parameters=self.parameters, prepared=self.prepared)
        writer = model.writer(temperature=self.temperature, top_k=self.top_k, seed=self.seed)
        return writer, model.tokenizer


def read_text(writer: "Writer", tokenizer: "Tokenizer", text: str) -> list[int]:
    """Have the model read a text; its tokens."""
    with as_utf8():
        text.encode()
    tokens = tokenizer.encode([text])[0].tolist()
    writer.read(tokens)
    return tokens


@contextmanager
def as_utf8() -> Iterator[None]:
    """Refuse text that is not UTF-8: by the locale Python fails to read it, or reads halves of surrogates.

    Raises:
        UserError: with a way out.
    """
    try:
        yield
    except UnicodeError:
        raise UserError(
            "the text to go on from is not UTF-8: convert it, for example with iconv -t UTF-8"
        ) from None


def show(pieces: Iterable[str]) -> Iterator[str]:
    """Print pieces of text as they come, and pass them on."""
    for piece in pieces:
        print(piece, end="", flush=True)
        yield piece
