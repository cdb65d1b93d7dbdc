import json

import pytest

from diloco.data.index import Index, PreparationSettings, Shard, read_index, read_settings, write_record
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
        ('"format": 2', '"format": 1', r"index\.json is not in format 2"),
        ("{", "[", "can't be read"),
        ("{", "\xff", "can't be read"),
        (
            '"vocab_size": 257',
            '"vocab_size": "257"',
            "vocab_size: expected int, got str.*: delete the",
        ),
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


def test_an_index_that_is_no_object(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="can't be read"):
        read_index(tmp_path)
