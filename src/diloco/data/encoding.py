"""Text to token ids where others made the tokenizer, or wrote the text: in a process with limited memory and time.

A replacement in a tokenizer's normalizer can turn a character into thousands, and its regular expression can
backtrack for ever, inside of a library that can't be interrupted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from diloco.data.contained import MIB, Contained
from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError

_FIXED_BYTES, _BYTES_PER_BYTE = 1024 * MIB, 256
"""Memory to encode nothing, and more for each byte of text; tokenizers in use take 120."""
_FIXED_SECONDS, _BYTES_PER_SECOND = 60.0, 2**14
"""Time to encode nothing, and text a second; tokenizers in use encode a megabyte."""
_FIXED_TOKENS, _TOKENS_PER_BYTE = 64, 16
"""Tokens of no text, and more for each byte of it; tokenizers in use make 1 at most."""


class ContainedTokenizer:
    """A tokenizer that encodes in a process of its own.

    Args:
        path: of its file.

    Raises:
        UserError: as `load_tokenizer`, or if that takes too much memory or time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = Contained(f"{__name__}:answering_with_ids", str(path), doing=f"{path} can't be used")
        try:
            answer = self._ask([])
        except BaseException:
            self._process.close()
            raise
        (self._vocab_size,) = np.frombuffer(answer, "<i8").tolist()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, as `Tokenizer.encode`.

        Raises:
            UserError: if it takes too much memory or time, or makes too many tokens, or one beyond the vocabulary.
        """
        if not texts:
            return []
        answer = self._ask(texts)
        counts = np.frombuffer(answer, "<i8", count=len(texts))
        ids = np.frombuffer(answer, "<u4", offset=counts.nbytes)
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise UserError(f"{self._path} makes token {ids.max()}, beyond its vocabulary of {self._vocab_size}")
        return np.split(ids, np.cumsum(counts)[:-1])

    def _ask(self, texts: list[str]) -> bytes:
        request = msgspec.json.encode(texts)
        return self._process.ask(
            request,
            most_bytes=_FIXED_BYTES + _BYTES_PER_BYTE * len(request),
            most_seconds=_FIXED_SECONDS + len(request) / _BYTES_PER_SECOND,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


def answering_with_ids(path: str) -> Callable[[bytes], bytes]:
    """The other end of `ContainedTokenizer`: texts in JSON give their numbers of ids, and the ids of all.

    No texts give the size of the vocabulary.
    """
    tokenizer = load_tokenizer(Path(path))

    def answer(request: bytes) -> bytes:
        """The ids of texts, or the size of the vocabulary."""
        texts = msgspec.json.decode(request, type=list[str])
        if not texts:
            return np.array([tokenizer.vocab_size], "<i8").tobytes()
        ids = tokenizer.encode(texts)
        for text, text_ids in zip(texts, ids, strict=True):
            if len(text_ids) > _FIXED_TOKENS + _TOKENS_PER_BYTE * len(text.encode()):
                raise UserError(
                    f"{path} makes {len(text_ids):,} tokens of a text of {len(text.encode()):,} bytes, more than "
                    f"{_TOKENS_PER_BYTE} a byte"
                )
        return np.array([*map(len, ids)], "<i8").tobytes() + np.concatenate(ids).astype("<u4").tobytes()

    return answer
