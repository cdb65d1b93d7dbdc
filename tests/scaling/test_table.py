"""A damaged table is refused; other tables: test_prediction.py."""

import pytest

from diloco.errors import UserError
from diloco.scaling.table import read_table


def test_a_table_with_an_endless_cell_is_refused_in_a_sentence(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text('params,replicas,eval_loss\n35e6,2,"' + "3.05,\n" * 40_000)
    with pytest.raises(UserError, match=r"table.csv can't be read as a table: field larger than"):
        read_table(table)
