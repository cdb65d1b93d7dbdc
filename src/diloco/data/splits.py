"""The split that each document belongs to."""

import hashlib
from collections.abc import Iterator

from diloco.data.config import DataConfig
from diloco.data.corpora import Document, documents, parts
from diloco.data.index import Split
from diloco.errors import UserError


def split_documents(config: DataConfig) -> Iterator[tuple[Split, Document]]:
    """Stream all documents of `config`, each with its split, always in the same order.

    Raises:
        UserError: as `documents` does, or if hardly any of the text belongs to the training split, and
            `config.max_train_bytes` is far less than what has to be read for it.
    """
    yield from _documents_to_train_on(config)
    for source in config.held_out:
        for document in documents(source, longest_bytes=config.max_document_bytes):
            yield "held_out", document


def _documents_to_train_on(config: DataConfig) -> Iterator[tuple[Split, Document]]:
    """The documents of the training sources, held-out ones included."""
    most_bytes = config.max_train_bytes
    train_bytes = read_bytes = 0
    for source in config.train:
        for document in documents(source, longest_bytes=config.max_document_bytes):
            split = _split(config, document)
            if most_bytes is not None:
                size_bytes = len(document.text.encode(errors="surrogatepass"))
                read_bytes += size_bytes + DOCUMENT_BYTES
                if read_bytes > 100 * most_bytes + _MOST_EXTRA_BYTES:
                    raise _too_little_text(source, most_bytes, train_bytes)
                train_bytes += size_bytes if split == "train" else 0
            yield split, document
            if most_bytes is not None and train_bytes >= most_bytes:
                return


DOCUMENT_BYTES = 2**8
"""Memory of a document without text."""
_MOST_EXTRA_BYTES = 2**26


def _split(config: DataConfig, document: Document) -> Split:
    is_out = not config.held_out and is_held_out(document.id, config.held_out_fraction)
    return "held_out" if is_out else "train"


def _too_little_text(source: str, most_bytes: int, train_bytes: int) -> UserError:
    return UserError(
        f"data.max_train_bytes={most_bytes}: more than a hundred times as much was read, up to {source}, and held "
        f"only {train_bytes} bytes of training text, the rest being empty or held out: name other sources",
        "data.max_train_bytes",
        "data.train",
    )


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
    if split == "held_out" and not config.held_out:
        return UserError(
            f"data.held_out_fraction={config.held_out_fraction} holds out none of the documents of "
            f"data.train={config.train}: raise it, or name data.held_out",
            "data.held_out_fraction",
            "data.train",
            "data.held_out",
        )
    name = f"data.{split}"
    return UserError(f"{name}={getattr(config, split)} holds no document for its split: name other sources", name)
