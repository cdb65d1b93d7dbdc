"""The documents of a config in the order in which they are packed, each in its split."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from diloco.data.config import DataConfig, as_typed
from diloco.data.corpora import documents, parts
from diloco.data.readers import Document, Reading
from diloco.data.shards import Split
from diloco.errors import UserError


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


def is_held_out_by_position(config: DataConfig) -> bool:
    """True if the end of each document is held out, since hashing ids would leave a split empty.

    The documents are read until that is known.
    """
    splits, train_bytes = set[Split](), 0
    for document in () if config.held_out else _training_documents(config, by_position=False):
        (split, _), *_ = split_parts(document, config, by_position=False)
        if document.text:
            splits.add(split)
        train_bytes += _num_bytes(document) if split == "train" else 0
        if len(splits) == 2 or (config.max_train_bytes is not None and train_bytes >= config.max_train_bytes):
            break
    return not config.held_out and len(splits) < 2


def split_documents(config: DataConfig, *, by_position: bool) -> Iterator[tuple[Split, Document]]:
    """Stream all documents of a config, each with its split, always in the same order.

    Args:
        config: names the sources.
        by_position: as `is_held_out_by_position` says.

    Raises:
        UserError: as `documents` does.
    """
    train_bytes = 0
    for document in _training_documents(config, by_position=by_position):
        for split, part in split_parts(document, config, by_position=by_position):
            yield split, part
            train_bytes += _num_bytes(part) if split == "train" else 0
        if config.max_train_bytes is not None and train_bytes >= config.max_train_bytes:
            break
    for source in config.held_out:
        for document in documents(source, reading_of(config)):
            yield "held_out", document


def _training_documents(config: DataConfig, *, by_position: bool) -> Iterator[Document]:
    def train_bytes(document: Document) -> int:
        return sum(
            _num_bytes(part)
            for split, part in split_parts(document, config, by_position=by_position)
            if split == "train"
        )

    return in_order([documents(source, reading_of(config)) for source in config.train], config, train_bytes)


_T = TypeVar("_T")


def in_order(
    streams: Sequence[Iterator[_T]],
    config: DataConfig,
    train_bytes: Callable[[_T], int],
    *,
    ended: Callable[[str], object] = lambda _: None,
) -> Iterator[_T]:
    """The documents of all training sources in the order in which they are packed.

    Without weights, that is one source after the other. With weights w, the next comes from the source that is
    furthest behind: the one with the least b / w, b being the bytes of training text that were read of it, and the
    first of several. So no source is ever ahead of its share by more than a document. The text ends with the first
    source that ends.

    Args:
        streams: one per training source, read only as far as needed.
        config: has the weights.
        train_bytes: bytes of training text in what a stream yields.
        ended: called with the source that ended the text, where there are weights.

    >>> config = DataConfig(train=("a.txt", "b.txt"), weights=(3, 1))
    >>> "".join(in_order([iter("aaaaaaa"), iter("bbb")], config, len))
    'abaaabaaab'
    """
    if not config.weights:
        yield from chain.from_iterable(streams)
        return
    read_bytes = [0] * len(streams)
    while True:
        turn = min(range(len(streams)), key=lambda i: read_bytes[i] / config.weights[i])
        try:
            item = next(streams[turn])
        except StopIteration:
            ended(config.train[turn])
            return
        read_bytes[turn] += train_bytes(item)
        yield item


def reading_of(config: DataConfig, skipped: Counter[str] | None = None) -> Reading:
    """The way in which a config reads rows; `skipped` counts those that it leaves out."""
    skipped = Counter() if skipped is None else skipped
    return Reading(config.text_field, config.max_document_bytes, skipped if config.skip_null else None)


def split_parts(document: Document, config: DataConfig, *, by_position: bool) -> list[tuple[Split, Document]]:
    """A training source's document in the split of its id, or its beginning and its end, unless empty, in a split
    each."""
    if not by_position:
        is_train = bool(config.held_out) or not is_held_out(document.id, config.held_out_fraction)
        return [("train" if is_train else "held_out", document)]
    cut = round(len(document.text) * (1 - config.held_out_fraction))
    texts: dict[Split, str] = {"train": document.text[:cut], "held_out": document.text[cut:]}
    return [(split, Document(document.id, text)) for split, text in texts.items() if text]


def _num_bytes(document: Document) -> int:
    return len(document.text.encode(errors="surrogatepass"))


def is_held_out(document_id: str, fraction: float) -> bool:
    """True for the `fraction` of all ids whose hash is lowest.

    Nothing else counts: a document stays in its split whatever is read beside it, in whatever order.
    """
    digest = hashlib.sha256(document_id.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def empty_split(config: DataConfig, split: Split) -> UserError:
    """The error for a split that no document belongs to."""
    training = (document for source in config.train for document in documents(source, reading_of(config)))
    if not config.held_out and any(document.text for document in training):
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
