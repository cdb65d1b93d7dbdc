"""A damaged table is refused; other tables: test_prediction.py."""

import csv
from collections.abc import Iterator

import pytest

from diloco.errors import UserError
from diloco.scaling.table import read_table


@pytest.fixture
def cells_of_the_usual_length() -> Iterator[None]:
    """The limit of a process that has read no corpus, which raises it."""
    limit = csv.field_size_limit(1 << 17)
    yield
    csv.field_size_limit(limit)


def test_a_table_with_an_endless_cell_is_refused_in_a_sentence(tmp_path, cells_of_the_usual_length):
    table = tmp_path / "table.csv"
    table.write_text('params,replicas,eval_loss\n35e6,2,"' + "3.05,\n" * 40_000)
    with pytest.raises(UserError, match=r"table.csv can't be read as a table: field larger than"):
        read_table(table)


def test_a_long_cell_is_not_repeated_whole(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("params,replicas,eval_loss\n35e6,2," + "x" * 1000)
    with pytest.raises(UserError, match=r"line 2: eval_loss must be a number, not 'x{40}'$"):
        read_table(table)


@pytest.mark.parametrize("cell", ["", "False", "no", "None", "nan", "0", "0.0"])
def test_a_run_that_did_not_fail_counts(tmp_path, cell):
    table = tmp_path / "table.csv"
    rows = [f"35e6,2,3.05,{cell}", "35e6,2,9.9,out of memory", f"90e6,2,2.8,{cell}"]
    table.write_text("\n".join(["params,replicas,eval_loss,failed", *rows]))
    assert [point.eval_loss for point in read_table(table)] == [3.05, 2.8]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("params,replicas,eval_loss,eval_loss\n35e6,2,3.05,9.9\n90e6,2,2.8,9.9\n")
    with pytest.raises(UserError, match=r"table.csv has two columns 'eval_loss': drop one"):
        read_table(table)
