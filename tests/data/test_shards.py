import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.corpora import INDEX, SETTINGS

from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.shards import (
    PreparationSettings,
    TokenShards,
    check_shard,
    open_split,
    read_index,
    read_record,
    tokens_digest,
    write_record,
)
from diloco.errors import UserError


def test_an_index_is_read_as_it_was_written(tmp_path):
    write_record(tmp_path / "index.json", INDEX)
    write_record(tmp_path / "settings.json", SETTINGS)
    assert read_index(tmp_path) == INDEX
    assert read_record(tmp_path / "settings.json", PreparationSettings) == SETTINGS


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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 90))
def test_the_first_tokens_are_those_of_the_whole(lengths, most):
    checked = []
    shards = tokens_of(*lengths)
    checks = tuple(lambda number=number: checked.append(number) for number in range(len(lengths)))
    first = dataclasses.replace(shards, checks=checks).first(most)
    num_tokens = min(most, sum(lengths))
    assert (first.num_tokens, shards.first(None)) == (num_tokens, shards)
    if num_tokens > 1:
        assert first.window(0, num_tokens - 1).tolist() == list(range(num_tokens))
        assert checked == list(range(len(first.shards))), "each shard that is read, once"


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


def rewritten(directory, tokens):
    """Replace the tokens of the first shard, at the same size, and their digest in the index."""
    path = directory / "train-00000.bin"
    before = tokens_digest(path.read_bytes())
    np.asarray(tokens, "<u2").tofile(path)
    index = (directory / "index.json").read_text()
    (directory / "index.json").write_text(index.replace(before, tokens_digest(path.read_bytes())))


def test_a_shard_that_was_altered_at_the_same_size_is_refused_before_its_first_token(prepared):
    path = prepared / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    train = open_split(prepared, "train")
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"train-00000\.bin has been altered .*: delete the directory, and prepare"
        ):
            train.window(0, 3)
    path.unlink()
    with pytest.raises(UserError, match=r"train-00000\.bin can't be read \(No such file"):
        check_shard(path, read_index(prepared).splits["train"][0], dtype="<u2")


def test_a_token_beyond_the_vocabulary_is_refused(prepared):
    rewritten(prepared, [256] * 90 + [256])
    assert open_split(prepared, "train").window(29, 3).tolist() == [256] * 4
    rewritten(prepared, [256] * 90 + [257])
    with pytest.raises(UserError, match=r"train-00000\.bin holds token 257, beyond the vocabulary of 257"):
        open_split(prepared, "train").window(0, 3)


def test_a_finished_shard_that_was_altered_is_not_kept(prepared, tmp_path):
    (prepared / "index.json").unlink()
    path = prepared / "train-00000.bin"
    path.write_bytes(b"\0" * path.stat().st_size)
    config = DataConfig(train=(f"{tmp_path}/train.txt",), held_out=(f"{tmp_path}/held_out.txt",))
    with pytest.raises(UserError, match=r"train-00000\.bin has been altered"):
        prepare(config, prepared)
