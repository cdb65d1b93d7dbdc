"""Text ⇄ token ids, behind one small protocol: bytes, Hugging Face's `tokenizer.json`, SentencePiece."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diloco.data.shards import INDEX_FILE, MOST_TOKENS, read_index
from diloco.errors import UserError
from diloco.files import expanded, require, requiring, sha256, write_atomically
from diloco.hub import hub_file
from diloco.schema import read_bytes

FILES = ("tokenizer.json", "tokenizer.model")
"""Names of a tokenizer's file in a directory: Hugging Face's, SentencePiece's."""


class Tokenizer(Protocol):
    """A mapping between text and token ids."""

    name: str
    """A name for people."""
    vocab_size: int
    """Number of ids: every id is below it."""
    bos_id: int
    """The id that precedes a document. No text encodes to it."""
    digest: str
    """SHA-256, in hexadecimal, of the data that define the mapping."""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without BOS: uint32, shape (num_tokens,)."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; BOS stands for none."""
        ...


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer of `bytes`, a `tokenizer.json`, a SentencePiece `.model`, or a directory with either.

    A directory made by `diloco data prepare` gives the tokenizer that it was prepared with.

    Raises:
        UserError: if it is none of these, has no BOS, or did not make the tokens of its directory.

    >>> tokenizer = load_tokenizer("bytes")
    >>> tokenizer.encode(["né"])
    [array([110, 195, 169], dtype=uint32)]
    >>> tokenizer.decode([256, 110, 195, 169])
    'né'
    """
    if spec == "bytes":
        return ByteTokenizer()
    if str(spec).startswith("bpe:"):
        raise UserError(f"tokenizer {spec!r} exists once it is trained: name the prepared directory instead")
    if (expanded(spec) / INDEX_FILE).is_file():
        return _load_prepared(expanded(spec))
    path = tokenizer_file(spec)
    return SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)


def is_file(spec: str) -> bool:
    """True for a tokenizer that is a file, named by its path or by its repository on the Hub."""
    return spec != "bytes" and not spec.startswith("bpe:")


def tokenizer_file(spec: str | Path) -> Path:
    """The file of a tokenizer that is named by its path, by that of a directory that holds it, or as on the Hub.

    Raises:
        UserError: if there is no such file.
    """
    path = expanded(spec)
    for candidate in (path, *(path / name for name in FILES)):
        if candidate.is_file() and candidate.suffix in (".json", ".model"):
            return candidate
    sentence = (
        f"data.tokenizer={spec} is neither bytes, nor bpe:SIZE, nor the path of a tokenizer.json, of a "
        "SentencePiece .model, or of a directory that holds one"
    )
    if path.exists() or path.suffix in (".json", ".model"):
        raise UserError(sentence, "data.tokenizer")
    try:
        downloaded = hub_file(str(spec), FILES)
    except UserError as error:
        raise UserError(f"{sentence}; {error}", "data.tokenizer") from error
    if downloaded is None:
        raise UserError(sentence, "data.tokenizer")
    return downloaded


def _load_prepared(directory: Path) -> Tokenizer:
    index = read_index(directory)
    if index.tokenizer_digest == ByteTokenizer.digest:
        return ByteTokenizer()
    if not any((directory / name).is_file() for name in FILES):
        raise UserError(f"{directory} has lost its tokenizer, {' or '.join(FILES)}: prepare it again")
    tokenizer = load_tokenizer(tokenizer_file(directory))
    if tokenizer.digest != index.tokenizer_digest:
        raise UserError(
            f"the tokenizer in {directory} has digest {tokenizer.digest}, but the tokens were made with "
            f"{index.tokenizer_digest}: prepare it again"
        )
    return tokenizer


class ByteTokenizer:
    """One token per byte of UTF-8, and BOS = 256."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256
    digest = sha256(b"UTF-8 bytes; BOS=256")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if i != self.bos_id).decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers library."""

    def __init__(self, path: Path) -> None:
        self.name, self._content = path.name, read_bytes(path, most_bytes=_MOST_FILE_BYTES)
        self.digest = sha256(self._content)
        with _failures_named(f"{path} is not a tokenizer.json"):
            self._backend = self.backend()
            vocabulary = self._backend.get_vocab(with_added_tokens=True)
            bos = _find_bos(self._backend, vocabulary)
        if bos is None:
            raise UserError(f"{path} has no token to precede a document: add one of {', '.join(_BOS)}")
        self.bos_id = vocabulary[bos]
        self.vocab_size = _checked_size(max(vocabulary.values()) + 1, path)
        # A text that spells BOS out must not get one: BOS is made a special token, and those are not looked for.
        self._backend.add_special_tokens([bos])
        self._backend.encode_special_tokens = True

    def backend(self) -> Any:
        """A new tokenizer of the library, as the file defines it, but without truncation and padding."""
        with requiring("tokenizers", extra="train"):
            from tokenizers import Tokenizer as Backend

        backend = Backend.from_buffer(self._content)
        backend.no_truncation()
        backend.no_padding()
        return backend

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, special tokens neither added nor recognised."""
        # Such as a word that is unknown, and no token for unknown words.
        with _failures_named(f"{self.name} can't encode the text"):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)


_BOS = ("<s>", "<|endoftext|>", "[BOS]", "<bos>", "<|begin_of_text|>")


def _find_bos(backend: Any, vocabulary: dict[str, int]) -> str | None:
    """The name of BOS: an added token, special ones first, or else an entry that its name does not encode to."""
    is_special = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    if names := [name for name in _BOS if name in is_special]:
        return max(names, key=is_special.__getitem__)  # Gemma's plain <s> is one of HTML
    for name in _BOS:
        if name in vocabulary and vocabulary[name] not in backend.encode(name, add_special_tokens=False).ids:
            return name
    return None


class SentencePieceTokenizer:
    """A SentencePiece `.model`. Most of them normalise white space, so that decoding does not restore it."""

    def __init__(self, path: Path) -> None:
        self.content = content = read_bytes(path, most_bytes=_MOST_FILE_BYTES)
        """The bytes of the file."""
        self._backend = require("sentencepiece", extra="data").SentencePieceProcessor()
        with _failures_named(f"{path} is not a SentencePiece model"):
            self._backend.LoadFromSerializedProto(content)
        self.name = path.name
        self.digest = sha256(content)
        self.vocab_size = _checked_size(self._backend.vocab_size(), path)
        self.bos_id: int = self._backend.bos_id()
        if self.bos_id < 0:
            raise UserError(f"{path} has no BOS to precede a document: train it with one")
        self.unknown: str = self._backend.id_to_piece(self._backend.unk_id())
        """The piece that stands for what it does not know."""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text."""
        with _failures_named(f"{self.name} can't encode the text"):
            encoded = self._backend.encode(texts, out_type=int)
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, control tokens left out."""
        return self._backend.decode([int(i) for i in ids])


def _checked_size(vocab_size: int, path: Path) -> int:
    if not 1 <= vocab_size <= MOST_TOKENS:
        raise UserError(f"{path} has ids up to {vocab_size - 1}: they must be below {MOST_TOKENS}")
    return vocab_size


@contextmanager
def _failures_named(sentence: str) -> Iterator[None]:
    """Turn every error of a tokenizer's library, which raises no narrow ones, into a UserError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # Rust's panics are no Exception; the message may quote the whole file
        raise UserError(f"{sentence}: {str(error)[:200]}") from error


_MOST_FILE_BYTES = 2**28


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE of `vocab_size` entries, `<bos>` among them, and save it as tokenizer.json.

    Raises:
        UserError: if `vocab_size` is too small to hold all bytes, or too large for these texts.
    """
    with requiring("tokenizers", extra="train"):
        from tokenizers import Tokenizer as Backend
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel
        from tokenizers.trainers import BpeTrainer

    if not ByteTokenizer.vocab_size <= vocab_size <= MOST_TOKENS:  # the library allocates for all of them at once
        sizes = f"take bpe:257 at least, which holds 256 bytes and BOS, and bpe:{MOST_TOKENS} at the most"
        raise UserError(f"data.tokenizer=bpe:{vocab_size} can't be: {sizes}", "data.tokenizer")
    backend = Backend(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocab_size:
        raise UserError(
            f"data.tokenizer=bpe:{vocab_size} is more than the {backend.get_vocab_size()} entries that the text "
            "yields: take fewer, or more text",
            "data.tokenizer",
        )
    write_atomically(path, [backend.to_str(pretty=True).encode()])


_MOST_TOKENS_OF_A_CHARACTER = 8
"""Most tokens of a character: its four bytes may be one each, and a tokenizer may put others before them."""


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
    """The text of tokens in pieces, which joined are the text of all.

    Args:
        tokenizer: of the tokens.
        ids: the tokens as they come.
        after: tokens that stand before them; some tokenizers begin a text in another way than they go on.

    >>> list(text_pieces(ByteTokenizer(), "né!".encode()))
    ['n', 'é', '!']
    """
    before, pending = [*after[-_MOST_TOKENS_OF_A_CHARACTER:]], []
    for token in ids:
        pending.append(token)
        text = _text_of(tokenizer, before, pending)
        if text and (not text.endswith("\ufffd") or len(pending) >= _MOST_TOKENS_OF_A_CHARACTER):
            yield text
            before, pending = pending, []
    if pending and (text := _text_of(tokenizer, before, pending)):
        yield text


def _text_of(tokenizer: Tokenizer, before: list[int], pending: list[int]) -> str:
    return tokenizer.decode([*before, *pending])[len(tokenizer.decode(before)) :]
