import time
from contextlib import suppress
from functools import partial
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.config import DataConfig
from diloco.data.index import read_index
from diloco.data.prepare import prepare
from diloco.data.shards import ShardChecks, TokenShards, check_shard, open_split, tokens_digest
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


def test_shards_are_checked_once_in_the_background_or_when_they_are_needed():
    calls = []
    gate = Event()

    def check(number):
        assert gate.wait(20)
        calls.append(number)
        if number == 2:
            raise UserError("shard 2 is damaged")

    checks = ShardChecks([partial(check, number) for number in range(3)])
    checks.start()
    gate.set()
    for _ in range(2):
        with suppress(UserError):
            checks.ensure(1)
    deadline = time.monotonic() + 20
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(UserError, match="shard 2 is damaged"):
        checks.ensure(2)
    with pytest.raises(UserError, match="shard 2 is damaged"):  # the run ends, whichever shard it reads next
        checks.ensure(0)
    assert sorted(calls) == [0, 1, 2]


def test_a_finished_shard_that_was_altered_is_not_kept(prepared, tmp_path):
    (prepared / "index.json").unlink()
    path = prepared / "train-00000.bin"
    path.write_bytes(b"\0" * path.stat().st_size)
    config = DataConfig(train=(f"{tmp_path}/train.txt",), held_out=(f"{tmp_path}/held_out.txt",))
    with pytest.raises(UserError, match=r"train-00000\.bin has been altered"):
        prepare(config, prepared)
