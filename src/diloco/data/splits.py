"""Which split a document belongs to."""

import hashlib
from collections.abc import Iterator

from diloco.data.config import DataConfig
from diloco.data.corpora import Document, documents
from diloco.data.index import Split


def split_documents(config: DataConfig) -> Iterator[tuple[Split, Document]]:
    """Stream all documents of `config`, each with its split, always in the same order.

    Raises:
        ValueError: as `documents` does.
    """
    for source in config.train:
        for document in documents(source):
            held_out = not config.held_out and is_held_out(document.id, config.held_out_fraction)
            yield "held_out" if held_out else "train", document
    for source in config.held_out:
        for document in documents(source):
            yield "held_out", document


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
