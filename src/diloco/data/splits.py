"""The split that each document belongs to."""

import hashlib
from collections.abc import Iterator
from itertools import chain

from diloco.data.config import DataConfig, as_typed
from diloco.data.corpora import documents, parts
from diloco.data.readers import Document, Reading
from diloco.data.shards import Split
from diloco.errors import UserError


class SplitDocuments:
    """All documents of a config, each with its split, always in the same order; each iteration reads them anew.

    Args:
        config: names the sources.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._by_position = False if config.held_out else None

    @property
    def by_position(self) -> bool:
        """True where hashing ids would leave a split empty, as with one document; known once some were read."""
        assert self._by_position is not None, "documents were read"
        return self._by_position

    def __iter__(self) -> Iterator[tuple[Split, Document]]:
        """Stream the documents.

        Raises:
            UserError: as `documents` does, or if hardly any of the text belongs to the training split, and
                `config.max_train_bytes` is far less than what has to be read for it.
        """
        config, num_bytes = self._config, 0
        training = _training_documents(config)
        if self._by_position is None:
            training = self._decided(training)
        split = _cut if self.by_position else _whole
        for document in training:
            for name, part in split(document, config):
                yield name, part
                num_bytes += _num_bytes(part) if name == "train" else 0
            if config.max_train_bytes is not None and num_bytes >= config.max_train_bytes:
                break
        for document in _documents(config, config.held_out):
            yield "held_out", document

    def _decided(self, training: Iterator[Document]) -> Iterator[Document]:
        """The training documents, once it is known how they are split; few are read twice for that."""
        config, splits, train_bytes = self._config, set[Split](), 0
        ahead: list[Document] | None = []
        ahead_bytes = 0
        for document in training:
            num_bytes = _num_bytes(document)
            ahead_bytes += num_bytes + DOCUMENT_BYTES
            if ahead is not None:
                ahead.append(document)
                if len(ahead) > 1 and ahead_bytes > _MOST_AHEAD_BYTES:
                    ahead = None
            ((name, _),) = _whole(document, config)
            if document.text:
                splits.add(name)
            train_bytes += num_bytes if name == "train" else 0
            if len(splits) == 2 or (config.max_train_bytes is not None and train_bytes >= config.max_train_bytes):
                break
        self._by_position = len(splits) < 2
        return _training_documents(config) if ahead is None else chain(ahead, training)


_MOST_AHEAD_BYTES = 2**24
"""Text that is kept until it is known how it is split; more is read again."""


def _num_bytes(document: Document) -> int:
    return len(document.text.encode(errors="surrogatepass"))


DOCUMENT_BYTES = 2**8
"""Memory of a document without text."""
_MOST_EXTRA_BYTES = 2**26


def _training_documents(config: DataConfig) -> Iterator[Document]:
    """The documents of the training sources, as long as not far more is read than is asked for."""
    most_bytes, read_bytes = config.max_train_bytes, 0
    for document in _documents(config, config.train):
        read_bytes += _num_bytes(document) + DOCUMENT_BYTES
        if most_bytes is not None and read_bytes > 100 * most_bytes + _MOST_EXTRA_BYTES:
            raise UserError(
                f"data.max_train_bytes={most_bytes}: more than a hundred times as much of data.train was read, "
                "and hardly any of it is training text, the rest being empty or held out: name other sources",
                "data.max_train_bytes",
                "data.train",
            )
        yield document


def _documents(config: DataConfig, sources: tuple[str, ...]) -> Iterator[Document]:
    reading = Reading(config.text_field, config.max_document_bytes)
    for source in sources:
        yield from documents(source, reading)


def _whole(document: Document, config: DataConfig) -> list[tuple[Split, Document]]:
    """A document in the split of its id."""
    is_for_evaluation = not config.held_out and is_held_out(document.id, config.held_out_fraction)
    return [("held_out" if is_for_evaluation else "train", document)]


def _cut(document: Document, config: DataConfig) -> list[tuple[Split, Document]]:
    """A document's beginning and its end, in a split each; an empty part is left out."""
    cut = round(len(document.text) * (1 - config.held_out_fraction))
    parts: tuple[tuple[Split, str], ...] = (("train", document.text[:cut]), ("held_out", document.text[cut:]))
    return [(split, Document(document.id, text)) for split, text in parts if text]


def check_disjoint(config: DataConfig) -> None:
    """Refuse to hold out text that is trained on.

    Raises:
        UserError: with the file or dataset that is among both.
    """
    trained = {part for source in config.train for part in parts(source)}
    for source in config.held_out:
        for part in parts(source):
            if part in trained:
                raise UserError(
                    f"{part} is both training and held-out text: leave it out of data.held_out or data.train",
                    "data.held_out",
                    "data.train",
                )


def is_held_out(document_id: str, fraction: float) -> bool:
    """True for the `fraction` of all ids whose hash is lowest.

    Nothing else counts: a document stays in its split whatever is read beside it, in whatever order.
    """
    digest = hashlib.sha256(document_id.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def empty_split(config: DataConfig, split: Split) -> UserError:
    """The error for a split that no document belongs to."""
    if not config.held_out and any(document.text for document in _training_documents(config)):
        effect, remedy = (
            ("holds out none", "raise it") if split == "held_out" else ("leaves nothing to train on", "lower it")
        )
        return UserError(
            f"data.held_out_fraction={config.held_out_fraction} {effect} of the text of "
            f"data.train={as_typed(config.train)}: {remedy}, add text, or name data.held_out",
            *("data.held_out_fraction", "data.train", "data.held_out"),
        )
    is_named = split == "held_out" and config.held_out
    name, sources = ("data.held_out", config.held_out) if is_named else ("data.train", config.train)
    return UserError(f"{name}={as_typed(sources)} holds no text: name other sources", name)
