import json
from pathlib import Path

import numpy as np
import pytest

from diloco.data import encoding
from diloco.data.config import DataConfig
from diloco.data.encoding import ContainedTokenizer
from diloco.data.index import read_index
from diloco.data.prepare import prepare
from diloco.data.tokenizers import HuggingFaceTokenizer, load_tokenizer
from diloco.errors import UserError

TEXTS = ["one two", "", "né漢 " * 99]


def write_tokenizer(path: Path, *, normalizer=None, split=None, **tokens: int) -> Path:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: 1 + i for i, symbol in enumerate(alphabet)} | {"<bos>": 0} | tokens
    backend = Tokenizer(models.BPE(vocabulary, []))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = bytes_
    if split is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), bytes_])
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.save(str(path))
    return path


def test_it_encodes_as_in_this_process(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    with ContainedTokenizer(path) as contained:
        for texts in (TEXTS, [""], []):
            for ids, expected in zip(contained.encode(texts), load_tokenizer(path).encode(texts), strict=True):
                assert ids.dtype == expected.dtype and np.array_equal(ids, expected)


def test_a_replacement_that_explodes_is_refused(tmp_path, monkeypatch):
    from tokenizers.normalizers import Replace, Sequence

    monkeypatch.setattr(encoding, "_FIXED_BYTES", 2**29)
    some = write_tokenizer(tmp_path / "some.json", normalizer=Replace("a", "a" * 100))
    with (
        ContainedTokenizer(some) as contained,
        pytest.raises(
            UserError, match=r"some\.json makes 1,000 tokens of a text of 10 bytes, more than 16 a byte"
        ),
    ):
        contained.encode(["a" * 10])
    much = write_tokenizer(tmp_path / "much.json", normalizer=Sequence([Replace("a", "a" * 100)] * 4))
    with (
        ContainedTokenizer(much) as contained,
        pytest.raises(UserError, match=r"much\.json can't be used: it takes more than 512 MiB of memory"),
    ):
        contained.encode(["a" * 1000])


@pytest.mark.parametrize("kind", ["a file", "bpe:260"])
def test_text_is_prepared_in_the_process_of_the_tokenizer(tmp_path, monkeypatch, kind):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"one two {i}"}) + "\n" for i in range(40)))
    path = write_tokenizer(tmp_path / "tokenizer.json")
    name = str(path) if kind == "a file" else kind
    monkeypatch.setattr(HuggingFaceTokenizer, "encode", lambda *_: pytest.fail("it encodes in this process"))
    config = DataConfig(train=(f"{tmp_path}/a.jsonl",), held_out_fraction=0.3, tokenizer=name)
    assert read_index(prepare(config, tmp_path / "out")).vocab_size == (257 if kind == "a file" else 260)


@pytest.mark.slow
def test_a_regular_expression_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "_FIXED_SECONDS", 2.0)
    monkeypatch.setattr(encoding, "_BYTES_PER_SECOND", 2**20)
    # Each text alone stays below the tries that the regular expressions' library allows in one match.
    rows = "".join(json.dumps({"text": f"{i}" + "a" * 22 + "b"}) + "\n" for i in range(3_000))
    (tmp_path / "a.jsonl").write_text(rows)
    path = write_tokenizer(tmp_path / "evil.json", split="(a+)+$")
    config = DataConfig(train=(f"{tmp_path}/a.jsonl",), held_out_fraction=0.3, tokenizer=str(path))
    with pytest.raises(UserError, match=r"evil\.json can't be used: it takes more than \d seconds"):
        prepare(config, tmp_path / "out")


def test_a_vocabulary_that_cannot_be_meant_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", x=300)
    path.write_text(path.read_text().replace('"x": 300', '"x": 2147483648'))
    with pytest.raises(UserError, match=r"tokenizer\.json has ids up to 2147483648: they must be below 16777216"):
        ContainedTokenizer(path)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    with ContainedTokenizer(write_tokenizer(tmp_path / "tokenizer.json")) as contained:
        contained._vocab_size = 2  # the process has another opinion
        with pytest.raises(UserError, match=r"tokenizer\.json makes token \d+, beyond its vocabulary of 2$"):
            contained.encode(["one"])
