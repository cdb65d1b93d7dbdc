"""Tables of rows: read as they were written, and refused in one sentence."""

import pytest

from diloco.errors import UserError
from diloco.experiments.runner.rows import read_rows, write_rows


def test_rows_come_back_as_they_were(tmp_path):
    rows = [{"M": 2, "loss": 1.25, "method": "diloco"}, {"M": 4, "failed": "no, it\ndid not"}]
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "can't be read"),
        (b"", "has no rows"),
        (b"\xff\n1\n", "is no table"),
        (b"a\n1,2\n", "more cells than"),
    ],
)
def test_a_file_that_is_no_table_is_refused(content, sentence, tmp_path):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_rows(path)
