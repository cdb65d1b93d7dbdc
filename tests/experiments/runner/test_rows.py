"""Tables of rows: read as they were written, and refused in one sentence."""

import pytest

from diloco.errors import FileError, UserError
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.scaling.table import read_table
from diloco.training.records.metrics import read_metrics


def test_rows_come_back_as_they_were(tmp_path):
    rows = [{"M": 2, "loss": 1.25, "method": "diloco"}, {"M": 4, "failed": "no, it\ndid not"}]
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        ("diloco.experiments.runner.rows.MOST_TABLE_BYTES", read_rows),
        ("diloco.scaling.table.MOST_TABLE_BYTES", read_table),
        ("diloco.training.records.metrics._MOST_BYTES", lambda path: read_metrics(path.parent, 0)),
    ],
)
def test_a_file_that_is_too_large_is_refused_before_it_is_read_whole(limit, read, tmp_path, monkeypatch):
    monkeypatch.setattr(limit, 1000)
    path = tmp_path / "metrics-0.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it has holes for contents: to read it all would take all memory
    with pytest.raises(FileError, match=r"metrics-0.jsonl can't be read: it has more than 1,000 bytes"):
        read(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "can't be read"),
        (b"", "has no rows"),
        (b"\xff\n1\n", "is no table"),
        (b"a\n1,2\n", "more cells"),
    ],
)
def test_a_file_that_is_no_table_is_refused(content, sentence, tmp_path):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_rows(path)
