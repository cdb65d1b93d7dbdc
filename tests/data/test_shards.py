from contextlib import suppress
from functools import partial
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.shards import (
    Index,
    PreparationSettings,
    Shard,
    ShardChecks,
    TokenShards,
    check_shard,
    open_split,
    read_index,
    read_settings,
    tokens_digest,
    write_record,
)
from diloco.errors import UserError

SETTINGS = PreparationSettings(
    train=("a.txt", "b.txt"),
    held_out=(),
    held_out_fraction=0.1,
    tokenizer="bytes",
    tokenizer_file_digest="",
    source_digest="0f",
    shard_tokens=8,
    max_train_bytes=5,
    text_field="text",
)
SHARD = Shard(num_tokens=8, num_documents=2, num_bytes=6, tokens_digest="3c")
INDEX = Index(
    settings=SETTINGS,
    tokenizer_digest="1e",
    vocab_size=257,
    bos_id=256,
    dtype="<u2",
    splits={"train": (SHARD, SHARD), "held_out": (SHARD,)},
    digest="2d",
    held_out_by_position=False,
)


def test_an_index_is_read_as_it_was_written(tmp_path):
    write_record(tmp_path / "index.json", INDEX)
    write_record(tmp_path / "settings.json", SETTINGS)
    assert read_index(tmp_path) == INDEX
    assert read_settings(tmp_path / "settings.json") == SETTINGS


def test_an_incomplete_directory(tmp_path):
    with pytest.raises(UserError, match=r"has no index\.json: prepare it"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"format": 2', '"format": 1', r"index\.json was prepared by another version of diloco: delete"),
        ("{", "[", "can't be read"),
        ('"text_field": "text"', '"name": "text"', "can't be read"),
        ("{", "\xff", "can't be read"),
        ('"vocab_size": 257', '"vocab_size": "257"', "vocab_size: expected int, got str.*: delete the"),
        ('"vocab_size": 257', '"vocab_size": 256', "bos_id=256 is not below vocab_size=256"),
        ('"vocab_size": 257', '"vocab_size": 1099511627776', "vocab_size: expected int <= 16777216"),
        ('"vocab_size": 257', '"vocab_size": 65537', "dtype=<u2 is not that of vocab_size=65537"),
        ('"dtype": "<u2"', '"dtype": "<u4"', "dtype=<u4 is not that of vocab_size=257"),
        ('"dtype": "<u2"', '"dtype": "<u3"', "dtype: invalid enum value '<u3'"),
        ('"num_bytes": 6', '"num_bytes": null', "num_bytes: expected int, got null"),
        ('"num_bytes": 6', '"num_bytes": -6', "num_bytes: expected int >= 0"),
        ('"num_tokens": 8', '"num_tokens": 1', "num_tokens=1 can't be those of num_documents=2"),
        ('"num_tokens": 8', '"num_tokens": 1e999', "can't be read"),
        ('"max_train_bytes": 5', '"max_train_bytes": []', "max_train_bytes: expected int . null, got array"),
        ('"digest": "2d"', '"digest": "2d", "extra": 1', "unknown field extra"),
        ('"tokens_digest": "3c"', '"tokens_digest": "../x"', "tokens_digest: "),
        ('"train": [', '"trained": [', "can't be read"),
        ('"held_out": []', '"held_out": 3', "can't be read"),
        ('"held_out": []', '"held_out": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, before, after, message):
    path = tmp_path / "index.json"
    write_record(path, INDEX)
    text = path.read_text()
    assert before in text
    path.write_bytes(text.replace(before, after).encode("latin-1"))
    with pytest.raises(UserError, match=message):
        read_index(tmp_path)


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
    gate, all_begun = Event(), Event()

    def check(number):
        assert gate.wait(20)
        calls.append(number)
        if len(calls) == 3:
            all_begun.set()
        if number == 2:
            raise UserError("shard 2 is damaged")

    checks = ShardChecks([partial(check, number) for number in range(3)])
    checks.start()
    gate.set()
    for _ in range(2):
        with suppress(UserError):
            checks.ensure(1)
    assert all_begun.wait(20)
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
