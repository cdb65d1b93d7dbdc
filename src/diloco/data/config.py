"""What a run reads: the sources of text, how they are held out, and how they become tokens."""

from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text of a run.

    Raises:
        UserError: if the fields contradict each other; the message names both values.
    """

    train: tuple[str, ...] = ("stdlib",)
    """Sources of training text: `stdlib`, a file or glob, or `hf:NAME[:CONFIG][:SPLIT]`."""
    held_out: tuple[str, ...] = ()
    """Sources of held-out text; where empty, a fraction of the training documents is held out."""
    held_out_fraction: float = 0.02
    """Share of the training documents that is held out, chosen by a hash of each document's id."""
    max_train_bytes: int | None = None
    """Training text is read up to so many bytes of UTF-8, to the end of a document; None is all of it. A token of
    32,000 is four to five bytes of English."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the training split), or a path: `tokenizer.json`, SentencePiece `.model`."""
    prepared: Path | None = field(default=None, metadata={"may_change_on_resume": True})
    """A directory made by `diloco data prepare`, to be read in place of the sources above."""
    cache: Path = Path("data")
    """Where sources are prepared on demand, each choice of settings in a directory of its own."""

    def __post_init__(self) -> None:
        if not self.train:
            raise UserError("train=() names no source of training text; name one, such as 'stdlib'")
        if not 0 < self.held_out_fraction < 1:
            raise UserError(f"held_out_fraction={self.held_out_fraction} must lie between 0 and 1")
        if self.max_train_bytes is not None and self.max_train_bytes < 1:
            raise UserError(
                f"max_train_bytes={self.max_train_bytes} must be at least 1; left out, all text is read"
            )
        if self.tokenizer.startswith("bpe:") and not self.tokenizer.removeprefix("bpe:").isdecimal():
            raise UserError(f"tokenizer={self.tokenizer!r} is not of the form bpe:SIZE, such as 'bpe:8192'")
        if self.held_out and self.held_out_fraction != DataConfig.held_out_fraction:
            raise UserError(
                f"held_out={self.held_out} and held_out_fraction={self.held_out_fraction} contradict each "
                "other; name held-out sources or a fraction of the training documents, not both"
            )
