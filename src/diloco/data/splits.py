"""Which split a document belongs to."""

import hashlib
from collections.abc import Iterator

from diloco.data.config import DataConfig
from diloco.data.corpora import Document, documents, parts
from diloco.data.index import Split
from diloco.errors import UserError


def split_documents(config: DataConfig) -> Iterator[tuple[Split, Document]]:
    """Stream all documents of `config`, each with its split, always in the same order.

    Raises:
        UserError: as `documents` does.
    """
    yield from _documents_to_train_on(config)
    for source in config.held_out:
        for document in documents(source):
            yield "held_out", document


def _documents_to_train_on(config: DataConfig) -> Iterator[tuple[Split, Document]]:
    """Those of the training sources, with those among them that are held out."""
    num_bytes = 0
    for source in config.train:
        for document in documents(source):
            if not config.held_out and is_held_out(document.id, config.held_out_fraction):
                yield "held_out", document
                continue
            yield "train", document
            if config.max_train_bytes is not None:
                num_bytes += len(document.text.encode(errors="surrogatepass"))
                if num_bytes >= config.max_train_bytes:
                    return


def check_disjoint(config: DataConfig) -> None:
    """Refuse to hold out what is trained on.

    Raises:
        UserError: naming a file or dataset that is among both.
    """
    trained = {part for source in config.train for part in parts(source)}
    for source in config.held_out:
        for part in parts(source):
            if part in trained:
                raise UserError(
                    f"{part} is both training and held-out text: leave it out of --held-out or --train"
                )


def is_held_out(document_id: str, fraction: float) -> bool:
    """Whether a document is among the `fraction` of all ids whose hash is lowest.

    It depends on nothing else: whatever is read beside it, in whatever order, a document stays in its split.
    """
    digest = hashlib.sha256(document_id.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def explain_empty(config: DataConfig, split: Split) -> str:
    """What to say of a split that no document belongs to."""
    if split == "train":
        return f"train={config.train} holds no document for the training split; name sources that do"
    if config.held_out:
        return f"held_out={config.held_out} holds no document; name sources that do"
    return (
        f"held_out_fraction={config.held_out_fraction} of the documents of train={config.train} came to none; "
        "raise it, or name held_out sources"
    )
