"""Files of every format: their documents, and a refusal that names the file and the place."""

import codecs
import csv
import gzip
import io
import json
import random
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

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


def as_parquet(columns, names=None, **options) -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table(columns) if names is None else pyarrow.Table.from_arrays(columns, names)
    pyarrow.parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def write(folder, name, rows) -> str:
    path = folder / name
    if name.endswith(".parquet"):
        path.write_bytes(as_parquet({field: [row[field] for row in rows] for field in rows[0]}))
    elif name.endswith(".jsonl"):
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


def test_csv_as_spreadsheets_write_it(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,other\r\n"a\r\nb",1\r\n\r\nc,2\r\n')
    expected = [Document("a.csv:1", "a\r\nb"), Document("a.csv:2", "c")]
    assert list(documents(str(tmp_path / "a.csv"))) == expected
    (tmp_path / "empty.csv").write_bytes(b"")
    assert list(documents(str(tmp_path / "empty.csv"))) == []


def test_blank_lines_and_the_header_take_nothing_of_a_rows_length(tmp_path):
    content = (
        b"\n" * 50 + b"text," + b"n" * 80 + b"\n" + b"\r\n" * 60 + b"a" * 90 + b",1\n" + b"\n" * 99 + b"b,2\n\n"
    )
    (tmp_path / "a.csv").write_bytes(content)
    expected = [Document("a.csv:1", "a" * 90), Document("a.csv:2", "b")]
    assert list(documents(str(tmp_path / "a.csv"), Reading(longest_bytes=100))) == expected


TOO_LONG = r"is longer than data\.max_document_bytes=100: cut it into documents, or raise that"


@pytest.mark.parametrize(
    ("name", "content", "message", "fields"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2 has no field `text`", "data.text_field"),
        ("a.jsonl", b"[]\n", "line 1 has no field `text`", "data.text_field"),
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2 is not JSON", ""),
        ("a.jsonl", b'{"text": "x", "n": ' + b"[" * 2**18, "line 1 is not JSON: .* nested too deep", ""),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "' + b"x" * 100 + b'"}\n',
            f"line 2 {TOO_LONG}",
            "data.max_document_bytes",
        ),
        ("a.txt", b"\xff", "it is no text in UTF-8; convert", ""),
        ("a.txt", b"x" * 101, f"the text {TOO_LONG}", "data.max_document_bytes"),
        ("a.txt.gz", b"no gzip", "", ""),
        ("a.txt.gz", gzip.compress(random.Random(0).randbytes(9999), mtime=0)[:5000], "", ""),
        ("a.txt.gz", gzip.compress(b"x" * 101, mtime=0), f"the text {TOO_LONG}", "data.max_document_bytes"),
        ("a.txt.zst", b"no zstd at all", "", ""),
        ("a.txt.zst", zstandard.compress(b"x" * 99)[:-3], "Truncated", ""),
        ("a.csv", b"text,text\none,two\n", ".* several columns `text`: rename all but one", ""),
        ("a.csv", b"\ntext," + b"n" * 100 + b"\na,1\n", f"the header {TOO_LONG}", "data.max_document_bytes"),
        ("a.csv", b"text,n\na,1\nb\n", "row 2 has 1 fields, and the header 2", ""),
        ("a.csv", b'text\n"a\n', "row 1 is not CSV: unexpected end of data", ""),
        ("a.csv", b'text\n"a" b\n', "row 1 is not CSV: ", ""),
        ("a.csv", b"text\n\xff\n", "it is no text in UTF-8", ""),
        ("a.csv", b'text\na\n"' + b"b\n" * 60 + b'"\n', f"row 2 {TOO_LONG}", "data.max_document_bytes"),
        ("a.parquet", b"no parquet", "", ""),
        ("a.parquet", b"PAR1" * 9, "", ""),
        ("a.parquet", as_parquet({"text": ["a", None]}), "row 2 has no field `text`", "data.text_field"),
        ("a.parquet", as_parquet({"content": ["a"]}), "row 1 has no field `text` .*`content`", "data.text_field"),
        ("a.parquet", as_parquet([pyarrow.array(["one"])] * 2, ["text"] * 2), ".* several columns `text`", ""),
        ("a.parquet", as_parquet({"text": ["a", "b" * 101]}), f"row 2 {TOO_LONG}", "data.max_document_bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_place(tmp_path, name, content, message, fields):
    (tmp_path / name).write_bytes(content)
    longest = 2**20 if b"[[[" in content else 100
    with pytest.raises(UserError, match=rf"{name} can't be read: {message}") as refusal:
        list(documents(str(tmp_path / name), Reading(longest_bytes=longest)))
    assert " ".join(refusal.value.fields) == fields


def test_a_missing_library_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install '.\[data\]' in diloco's clone"):
        list(documents(str(tmp_path / "a.txt.zst")))
