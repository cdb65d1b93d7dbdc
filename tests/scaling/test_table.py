"""Tables that are refused, and rows that count."""

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


@pytest.mark.parametrize("cell", ["", "False", "no", "None", "nan", "0", "0.0"])
def test_a_run_that_did_not_fail_counts(tmp_path, cell):
    table = tmp_path / "table.csv"
    rows = [f"35e6,2,3.05,{cell}", "35e6,2,9.9,out of memory", f"90e6,2,2.8,{cell}"]
    table.write_text("\n".join(["params,replicas,eval_loss,failed", *rows]))
    assert [point.eval_loss for point in read_table(table)] == [3.05, 2.8]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("params,replicas,eval_loss,eval_loss\n35e6,2,3.05,9.9\n", "has two columns 'eval_loss': drop one"),
        (f"params,replicas,eval_loss\n35e6,2,{'x' * 1000}", "line 2: eval_loss must be a number, not 'x{40}'$"),
        ("params,loss\n1,2\n", "no column 'replicas': it needs .* commas between them, and has 'params', 'loss'"),
        ("", "no column 'params': .* and has none"),
        ("params,replicas,eval_loss\n", "has no run: a law in N needs two sizes"),
        ("params,replicas,eval_loss\n1e6,1\n", "line 2: eval_loss is missing"),
        ("params,replicas,eval_loss\n1e6,1,2\n2e6,1,nan\n", "line 3: eval_loss must be above 0 and finite, not"),
        ("params,replicas,eval_loss\n1e6,1,-2\n", "line 2: eval_loss must be above 0 and finite, not -2"),
        ("params,replicas,eval_loss\n1e6,1,x\n", "line 2: eval_loss must be a number, not 'x'"),
        ("params,replicas,eval_loss\n1e6,1.5,2\n", "line 2: replicas must be a whole number, not 1.5"),
        ("params,replicas,eval_loss\n# c\n1e6,1,2\n1e6,2,2\n", r"runs of one size only \(1e\+06\)"),
        ("params,replicas,eval_loss,learning_rate\n1e6,1,2,0.1\n2e6,1,2,\n", "line 3: learning_rate is missing,"),
        (
            "params,replicas,eval_loss,sync_every\n1e6,0,2,\n1e6,1,2,30\n2e6,1,2,100\n",
            r"runs of several periods \(30, 100\): set sync_every to one",
        ),
        ("params,replicas,eval_loss\n1e6,1,2,95\n2e6,1,2,\n", "line 2: more cells than columns .a decimal comma"),
        ("params,replicas,eval_loss\n1e6,1,2\n1000100,1,1.9\n", r"runs of one size only \(1e\+06\)"),
        ("params,replicas,eval_loss\n1e6,1,2\n2e6,1,2\n1e6,1,2\n", "lines 2 and 4 are runs of the same settings"),
        (
            "params,replicas,eval_loss,seed,wire\n1e6,1,2,0,fp32\n2e6,1,2,0,fp32\n2e6,1,2,0,e3m0\n",
            "lines 3 and 4 are runs of the same settings: if they differ in their seed, .* keep the rows of one",
        ),
        ("params,replicas,eval_loss,tokens\n1e6,1,2,2e7\n2e6,1,2,1e7\n", "runs of 5 to 20 tokens a parameter"),
    ],
)
def test_bad_data_is_refused_by_its_row(text, sentence, tmp_path):
    path = tmp_path / "sweep.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_table(path)
