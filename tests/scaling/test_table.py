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
