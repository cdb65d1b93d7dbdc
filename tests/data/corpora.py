"""Files of text as tests write them, and an index."""

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from diloco.data.shards import Index, PreparationSettings, Shard

SETTINGS = PreparationSettings(
    train=("a.txt", "b.txt"),
    held_out=(),
    held_out_fraction=0.1,
    tokenizer="bytes",
    tokenizer_file_digest="",
    source_digest="0f",
    shard_tokens=8,
    max_train_bytes=5,
    text_field="text",
    skip_null=False,
)
SHARD = Shard(num_tokens=8, num_documents=2, num_bytes=6, tokens_digest="3c")
INDEX = Index(
    settings=SETTINGS,
    tokenizer_digest="1e",
    vocab_size=257,
    bos_id=256,
    dtype="<u2",
    splits={"train": (SHARD, SHARD), "held_out": (SHARD,)},
    digest="2d",
    held_out_by_position=False,
)


def write_rows(path: Path, texts: list[str], prefix: str = "doc") -> str:
    rows = [{"id": f"{prefix}{i}", "text": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def as_parquet(columns, names=None, **options) -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table(columns) if names is None else pyarrow.Table.from_arrays(columns, names)
    pyarrow.parquet.write_table(table, buffer, **options)
    return buffer.getvalue()
