"""Files of every format, and their documents."""

import codecs
import csv
import gzip
import io
import json
from collections import Counter

import pyarrow
import pytest
import zstandard
from tests.data.corpora import as_parquet

from diloco.data.corpora import documents
from diloco.data.readers import Document, Reading
from diloco.errors import UserError

ROWS = [{"id": "one", "body": 'né, "x"\r\ntwo\n', "n": "1"}, {"id": "two", "body": "", "n": "2"}]
EXPECTED = [Document(row["id"], row["body"]) for row in ROWS]


def as_csv(rows=ROWS) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def write(folder, name, rows) -> str:
    path = folder / name
    if name.endswith(".parquet"):
        path.write_bytes(as_parquet({field: [row[field] for row in rows] for field in rows[0]}))
    elif name.lower().endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_bytes(gzip.compress(as_csv(rows)) if name.endswith(".gz") else as_csv(rows))
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.csv.gz", "a.parquet"])
def test_text_field_names_the_text_of_every_format(tmp_path, name):
    assert list(documents(write(tmp_path, name, ROWS), Reading("body"))) == EXPECTED
    with pytest.raises(UserError, match=r"no field `text` .*`body`.*: name one in data.text_field") as refusal:
        list(documents(str(tmp_path / name)))
    assert refusal.value.fields == ("data.text_field",)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_and_jsonl_plain_and_compressed(tmp_path, suffix):
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    rows = [
        {"text": "one\r\ntwo\u2028three"},
        {"text": "", "id": "empty"},
        {"text": "né", "id": 7},
        {"text": LONG},
    ]
    lines = ["".join(json.dumps(row, ensure_ascii=False) + "\n" for row in some) for some in (rows[:1], rows[1:])]
    # Several compressed streams in one file are all read.
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"".join(compress(some.encode()) for some in lines))
    (tmp_path / f"a.txt{suffix}").write_bytes(compress("line\r\nnéxt\n".encode()))
    read = [(document.id, document.text) for document in documents(str(tmp_path / f"a.jsonl{suffix}"))]
    names = [f"a.jsonl{suffix}:1", "empty", f"a.jsonl{suffix}:3", f"a.jsonl{suffix}:4"]
    assert read == list(zip(names, [row["text"] for row in rows], strict=True))
    assert list(documents(str(tmp_path / f"*.txt{suffix}"))) == [Document(f"a.txt{suffix}", "line\r\nnéxt\n")]


LONG = "né\u2028" + "x" * 2**20


def test_a_byte_order_mark_and_blank_lines_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"hello")
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "one"}\n\n \n{"text": "two"}\n\n')
    read = [*documents(f"{tmp_path}/a.txt"), *documents(f"{tmp_path}/b.jsonl")]
    assert read == [Document("a.txt", "hello"), Document("b.jsonl:1", "one"), Document("b.jsonl:4", "two")]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
@pytest.mark.parametrize("size", [1, 2**18])
def test_parquet_streams_all_rows_of_every_type_and_size(tmp_path, kind, size):
    texts = [f"text {i}" * (i % 50) + "x" * size for i in range(9000 if size == 1 else 9)]
    names = ["x", None, "z"] * (len(texts) // 3)
    columns = {"n": texts, "text": pyarrow.array(texts, getattr(pyarrow, kind)()), "id": names}
    (tmp_path / "a.parquet").write_bytes(as_parquet(columns, row_group_size=4000, use_dictionary=False))
    ids = [name or f"a.parquet:{number}" for number, name in enumerate(names, start=1)]
    read = [(document.id, document.text) for document in documents(str(tmp_path / "a.parquet"))]
    assert read == list(zip(ids, texts, strict=True))


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.parquet"])
def test_rows_whose_text_is_null_are_left_out_and_counted_on_demand(tmp_path, name):
    path = write(tmp_path, name, [{"text": text} for text in ("one", None, None, "two")])
    skipped = Counter[str]()
    read = list(documents(path, Reading(skipped=skipped)))
    assert read == [Document(f"{name}:1", "one"), Document(f"{name}:4", "two")] and skipped == {name: 2}


def test_csv_as_spreadsheets_write_it(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,other\r\n"a\r\nb",1\r\n\r\nc,2\r\n')
    expected = [Document("a.csv:1", "a\r\nb"), Document("a.csv:2", "c")]
    assert list(documents(str(tmp_path / "a.csv"))) == expected
    (tmp_path / "empty.csv").write_bytes(b"")
    assert list(documents(str(tmp_path / "empty.csv"))) == []
