"""Rows of every format: the field that holds their text, and CSV."""

import csv
import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest

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
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
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


def test_text_field_names_the_text_of_a_line_that_is_long(tmp_path):
    rows = [{"body": "x" * 2**20, "text": "y", "id": "z"}]
    assert list(documents(write(tmp_path, "a.jsonl", rows), Reading("body"))) == [Document("z", "x" * 2**20)]


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\ntext," + b"n" * 100 + b"\na,1\n", "the header is longer than data.max_document_bytes=100"),
        (b"text,n\na,1\nb\n", "row 2 has 1 fields, and the header 2"),
        (b'text\n"a\n', "row 1 is not CSV: unexpected end of data"),
        (b'text\n"a" b\n', "row 1 is not CSV: "),
        (b"text\n\xff\n", "it is no text in UTF-8"),
        (b"text\na\n" + b'"' + b"b\n" * 60 + b'"\n', "row 2 is longer than data.max_document_bytes=100"),
    ],
)
def test_csv_that_cannot_be_read_names_the_row(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.csv can't be read: {message}"):
        list(documents(str(tmp_path / "a.csv"), Reading(longest_bytes=100)))
