import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.shards import TokenShards, open_split
from diloco.errors import UserError


def tokens_of(*lengths):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    shards = tuple(np.split(tokens, np.cumsum(lengths)[:-1]))
    return TokenShards(shards=shards, num_bytes=0, vocab_size=2**16, bos_id=0, digest="")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 20))
def test_windows_straddle_shards_and_overlap_by_one(lengths, length):
    shards = tokens_of(*lengths)
    if sum(lengths) <= length:
        with pytest.raises(
            UserError, match=f"{sum(lengths)} tokens, .* sequence_length={length} takes {length + 1}:"
        ):
            shards.num_windows(length)
        return
    assert shards.num_windows(length) == (sum(lengths) - 1) // length
    for i in range(shards.num_windows(length)):
        window = shards.window(i, length)
        assert window.dtype == np.int64
        assert window.tolist() == list(range(i * length, (i + 1) * length + 1))


@pytest.fixture
def prepared(tmp_path):
    for name, text in (("train", "abcdefghij" * 9), ("held_out", "xyz" * 9)):
        (tmp_path / f"{name}.txt").write_text(text)
    config = DataConfig(train=(f"{tmp_path}/train.txt",), held_out=(f"{tmp_path}/held_out.txt",))
    return prepare(config, tmp_path / "prepared")


def test_a_split_is_opened_as_it_was_prepared(prepared):
    train = open_split(prepared, "train")
    assert (train.num_tokens, train.num_bytes, train.bos_id, train.vocab_size) == (91, 90, 256, 257)
    assert train.window(0, 3).tolist() == [256, *b"abc"]
    assert isinstance(train.shards[0], np.memmap)
    assert open_split(prepared, "held_out").num_tokens == 28


@pytest.mark.parametrize("damage", ["shorter", "longer", "absent"])
def test_a_damaged_shard_is_named(prepared, damage):
    path = prepared / "train-00000.bin"
    content = path.read_bytes()
    path.write_bytes({"shorter": content[:-2], "longer": content + b"xx", "absent": b""}[damage])
    if damage == "absent":
        path.unlink()
    with pytest.raises(UserError, match=r"train-00000\.bin holds \d+ bytes, not the 182"):
        open_split(prepared, "train")
