import pyarrow
import pyarrow.parquet
import pytest

from diloco.data.parquet import ParquetReader
from diloco.errors import UserError


def test_rows_of_all_files_and_types_in_one_process(tmp_path):
    texts = [f"text {i}" * (i % 50) for i in range(9000)]
    for type_name in ("string", "large_string", "string_view"):
        table = pyarrow.table({"text": pyarrow.array(texts, getattr(pyarrow, type_name)()), "n": texts})
        pyarrow.parquet.write_table(table, tmp_path / f"{type_name}.parquet", row_group_size=4000)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None], "id": [3, 4]}), tmp_path / "z.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" * 9)
    with ParquetReader("text", 2**20) as reader:
        for type_name in ("string", "large_string", "string_view"):
            assert [row["text"] for row in reader.rows(tmp_path / f"{type_name}.parquet")] == texts
        with pytest.raises(UserError, match=r"broken\.parquet can't be read: "):
            list(reader.rows(tmp_path / "broken.parquet"))
        assert list(reader.rows(tmp_path / "z.parquet")) == [{"text": "a"}, {}]


def test_a_file_that_takes_much_memory_is_refused(tmp_path):
    table = pyarrow.table({"text": ["x" * 2**20 + str(i) for i in range(64)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="zstd")
    with ParquetReader("text", 2**20) as reader:
        assert len(list(reader.rows(tmp_path / "a.parquet"))) == 64
        reader._most_bytes = 2**26
        with pytest.raises(UserError, match=r"a\.parquet can't be read: it takes more than 64 MiB of memory"):
            list(reader.rows(tmp_path / "a.parquet"))
