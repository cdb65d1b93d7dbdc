"""Settings, sources, files, tokenizers and prepared directories that are refused, each by one sentence."""

import gzip
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.data.corpora import INDEX, as_parquet, write_rows

from diloco.data.config import DataConfig
from diloco.data.corpora import documents
from diloco.data.prepare import prepare, resolve
from diloco.data.readers import Reading
from diloco.data.sampling import Sampler, SlotSampler
from diloco.data.shards import read_index, write_record
from diloco.data.tokenizers import load_tokenizer, train_bpe
from diloco.errors import UserError

Act = Callable[[Path], object]


def config(**fields: object) -> Act:
    return lambda _: DataConfig(**fields)


def source(name: str) -> Act:
    """Reading a source in a folder with a text, two files of unknown suffixes, and an empty folder."""

    def act(folder: Path) -> None:
        (folder / "none").mkdir()
        for file in ("a.txt", "b.md", "c.parquet.gz"):
            (folder / file).write_text("text")
        next(documents(name))

    return act


def file(name: str, content: bytes | Callable[[], bytes], longest: int = 100) -> Act:
    def act(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())
        list(documents(str(folder / name), Reading(longest_bytes=longest)))

    return act


def parquet(*columns: Any) -> Callable[[], bytes]:
    """A file that is made when its test runs: pyarrow then imports pandas, which takes a second."""
    return lambda: as_parquet(*columns)


def tokenizer(name: str, old: str | None, new: str) -> Act:
    """Loading a file, or a tokenizer.json of which a part was replaced."""

    def act(folder: Path) -> None:
        if old is not None:
            train_bpe(["one two three"] * 9, 260, folder / name)
        (folder / name).write_text(new if old is None else (folder / name).read_text().replace(old, new))
        load_tokenizer(folder / name)

    return act


def bpe(size: int) -> Act:
    return lambda folder: train_bpe(["some text"], size, folder / "tokenizer.json")


def index(before: str, after: str) -> Act:
    def act(folder: Path) -> None:
        write_record(folder / "index.json", INDEX)
        text = (folder / "index.json").read_text()
        assert before in text
        (folder / "index.json").write_bytes(text.replace(before, after).encode("latin-1"))
        read_index(folder)

    return act


def prepared(train: list[str], held_out: list[str] | None = None, **fields: object) -> Act:
    """Preparing rows of text."""

    def act(folder: Path) -> None:
        sources = {"train": (write_rows(folder / "train.jsonl", train),)}
        if held_out is not None:
            sources["held_out"] = (write_rows(folder / "held_out.jsonl", held_out),)
        try:
            prepare(DataConfig(**sources, **fields), folder / "out")
        finally:
            assert not (folder / "out" / "index.json").exists()

    return act


def disjoint(train: str, held_out: str) -> Act:
    def act(folder: Path) -> None:
        write_rows(folder / "rows.jsonl", ["x"])
        prepare(DataConfig(train=(train,), held_out=(held_out.replace("HERE", str(folder)),)), folder / "out")

    return act


def twice(*train: str) -> Act:
    """Preparing a file that is read twice, of which a fraction is held out."""

    def act(folder: Path) -> None:
        (folder / "deep").mkdir()
        write_rows(folder / "deep" / "rows.jsonl", ["x"])
        prepare(DataConfig(train=train), folder / "out")

    return act


TOO_LONG = r"is longer than data\.max_document_bytes=100: cut it into documents, or raise that"
LONG_FIELD = "data.max_document_bytes"
NULL = "has null as its field `text`: set data.skip_null to leave such rows out"
NO_OBJECT = (
    r"is not one JSON object, as each line of a \.jsonl is: write it so, as jq -c '\.\[\]' does with an array"
)
FILES = [
    ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2 has no field `text`", "data.text_field"),
    ("a.jsonl", b'"x"\n', "line 1 has no field `text`", "data.text_field"),
    ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', f"line 2 {NULL}", "data.skip_null"),
    ("a.jsonl", b'{"text": "x"}\n[]\n', f"line 2 {NO_OBJECT}", ""),
    ("a.jsonl", b'[{"text": "x"},', f"line 1 {NO_OBJECT}", ""),
    ("a.jsonl", b'[{"text": "' + b"x" * 100 + b'"}]', f"line 1 {NO_OBJECT}", ""),
    ("a.jsonl", b'{\n  "text": "x"\n}\n', f"line 1 {NO_OBJECT}", ""),
    ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2 is not JSON", ""),
    ("a.jsonl", b'{"text": "x"}\n{"text": "' + b"x" * 100 + b'"}\n', f"line 2 {TOO_LONG}", LONG_FIELD),
    ("a.txt", b"\xff", "it is no text in UTF-8; convert", ""),
    ("a.txt", b"x" * 101, f"the text {TOO_LONG}", LONG_FIELD),
    ("a.txt.gz", b"no gzip", "", ""),
    ("a.txt.gz", gzip.compress(random.Random(0).randbytes(9999), mtime=0)[:5000], "", ""),
    ("a.txt.gz", gzip.compress(b"x" * 101, mtime=0), f"the text {TOO_LONG}", LONG_FIELD),
    ("a.txt.zst", b"no zstd at all", "", ""),
    ("a.txt.zst", zstandard.compress(b"x" * 99)[:-3], "Truncated", ""),
    ("a.csv", b"text,text\none,two\n", ".* several columns `text`: rename all but one", ""),
    ("a.csv", b"text,n\na,1\nb\n", "row 2 has 1 fields, and the header 2", ""),
    ("a.csv", b'"te"xt,id\na,1\n', "the header is not CSV: ", ""),
    ("a.csv", b'text\n"a\n', "row 1 is not CSV: unexpected end of data", ""),
    ("a.csv", b'text\n"a" b\n', "row 1 is not CSV: ", ""),
    ("a.csv", b"text\n\xff\n", "it is no text in UTF-8", ""),
    ("a.csv", b'text\na\n"' + b"b\n" * 60 + b'"\n', f"row 2 {TOO_LONG}", LONG_FIELD),
    ("a.csv", b'text\n"' + b"b" * 2**18 + b'"', f"row 1 {TOO_LONG}", LONG_FIELD),
    ("a.parquet", b"no parquet", "", ""),
    ("a.parquet", b"PAR1" * 9, "", ""),
    ("a.parquet", parquet({"text": ["a", None]}), f"row 2 {NULL}", "data.skip_null"),
    ("a.parquet", parquet({"content": ["a"]}), "row 1 has no field `text` .*`content`", "data.text_field"),
    ("a.parquet", parquet([["one"]] * 2, ["text"] * 2), ".* several columns `text`", ""),
    ("a.parquet", parquet({"text": ["a", "b" * 101]}), f"row 2 {TOO_LONG}", LONG_FIELD),
]
"""Name, content, refusal, field."""
SOURCES = {
    "": "a source of text is empty",
    "absent.txt": "matches no file",
    "absent/**/*.jsonl": "matches no file",
    "none": r"the directory none holds no file with a known suffix: \.txt",
    "*": r"b\.md has none of the known suffixes: \.txt, .*\.csv, .*\.parquet",
    "c.parquet.gz": r"c\.parquet\.gz has none of the known suffixes",
    "https://host/a.jsonl": r"is a URL, .*: download it, or name a data set .* by hf:NAME$",
    "**.txt": "can't be looked up",
    "~nobody-of-that-name/a.txt": "home directory",
    **dict.fromkeys(("hf:", "hf::en", "hf:a:b:", "hf:a:b:c:d"), "is not of the form hf:NAME"),
}
INDICES = [
    ('"format": 3', '"format": 2', r"index\.json was prepared by another version of diloco: delete"),
    ("{", "[", "can't be read"),
    ('"vocab_size": 257', '"vocab_size": "257"', "vocab_size: expected int, got str.*: delete the"),
    ('"vocab_size": 257', '"vocab_size": 256', "bos_id=256 is not below vocab_size=256"),
    ('"vocab_size": 257', '"vocab_size": 1099511627776', "vocab_size: expected int <= 16777216"),
    ('"vocab_size": 257', '"vocab_size": 65537', "dtype=<u2 is not that of vocab_size=65537"),
    ('"dtype": "<u2"', '"dtype": "<u4"', "dtype=<u4 is not that of vocab_size=257"),
    ('"dtype": "<u2"', '"dtype": "<u3"', "dtype: invalid enum value '<u3'"),
    ('"num_bytes": 6', '"num_bytes": -6', "num_bytes: expected int >= 0"),
    ('"num_tokens": 8', '"num_tokens": 1', "num_tokens=1 can't be those of num_documents=2"),
    ('"tokens_digest": "3c"', '"tokens_digest": "../x"', "tokens_digest: "),
]
"""A part of an index, the text in its place, and the refusal."""
CONFIGS = [
    ({"train": ()}, "data.train names no source"),
    ({"text_field": ""}, "data.text_field='' names no text"),
    ({"held_out_fraction": 0.0}, "data.held_out_fraction=0.0 must lie between"),
    ({"held_out_fraction": 1.0}, "data.held_out_fraction=1.0 must lie between"),
    ({"max_train_bytes": 0}, "data.max_train_bytes=0 must be at least 1"),
    ({"max_train_tokens": 0}, "data.max_train_tokens=0 must be at least 1"),
    ({"max_document_bytes": 2**31}, "data.max_document_bytes=2147483648 must be .* below 2"),
    (
        {"weights": (1.0, 2.0), "train": ("a.txt",)},
        "data.weights=1.0 2.0 must be one number above 0 per",
    ),
    ({"weights": (0.0,), "train": ("a.txt",)}, "data.weights=0.0 must be one"),
    ({"workers": 0}, "data.workers=0 must be at least 1"),
    ({"tokenizer": "bpe:8k"}, "data.tokenizer=bpe:8k is not of the form"),
    ({"tokenizer": "bpe:1234567890"}, "data.tokenizer=bpe:1234567890 is not of the form"),
    ({"held_out_fraction": 0.1, "held_out": ("a.txt", "b.txt")}, "data.held_out_fraction=0.1 contradicts"),
]
NO_TEXT = r"\.jsonl holds no text: name other sources"
BOTH = "leave it out of data.held_out or data.train"
OF_FRACTION = "data.held_out_fraction data.train data.held_out"
DEEP = file("a.jsonl", b'{"text": "x", "n": ' + b"[" * 2**18, 2**20)
FIXED: list[tuple[Act, str, str]] = [
    (DEEP, "line 1 is not JSON: .* nested too deep", ""),
    (tokenizer("no.json", "<bos>", "<other>"), "no token to precede a document", ""),
    (tokenizer("large.json", ": 259", ": 2147483648"), r"large\.json has ids up to 2147483648: they must", ""),
    (
        tokenizer("long.json", "{", "{" + " " * 2**17),
        r"long\.json can't be read: it has more than 65,536 bytes",
        "",
    ),
    *(
        (tokenizer(name, None, text), f"{name} is not a", "")
        for name in ("a.json", "a.model")
        for text in ("", "{}")
    ),
    *(
        (lambda _, s=spec: load_tokenizer(s), "neither bytes, nor", "data.tokenizer")
        for spec in ("byte", "a.json", "/")
    ),
    (lambda _: load_tokenizer("bpe:9000"), "name the prepared directory", ""),
    (bpe(256), "take bpe:257 at least", "data.tokenizer"),
    (bpe(50_000), "bpe:50000 is more than the", "data.tokenizer"),
    (bpe(999_999_999), r"bpe:\d+ at the most", "data.tokenizer"),
    (read_index, r"has no index\.json: prepare it", ""),
    (prepared([], ["x"]), f"data.train=.*/train{NO_TEXT}", "data.train"),
    (prepared(["x"], [""] * 50), f"data.held_out=.*/held_out{NO_TEXT}", "data.held_out"),
    (prepared(["x"], []), f"data.held_out=.*/held_out{NO_TEXT}", "data.held_out"),
    (prepared([]), f"data.train=.*/train{NO_TEXT}", "data.train"),
    (prepared(["x"]), r"data.held_out_fraction=0\.02 holds out none of the text of data.train=", OF_FRACTION),
    (prepared(["ab"], held_out_fraction=0.9), "leaves nothing to train on of the text.*: lower it", OF_FRACTION),
    (prepared(["fine", "\ud800"]), "document 'doc1' can't be encoded in UTF-8", ""),
    *(
        (disjoint(*two), BOTH, "data.held_out data.train")
        for two in (("*.jsonl", "HERE/rows.jsonl"), ("hf:a", "hf:a::train"))
    ),
    *(
        (twice(*train), rf"is read as {names}, so that .*: leave one out", "data.train data.held_out")
        for train, names in (
            ((".", "deep/*.jsonl"), r"deep/rows\.jsonl and as rows\.jsonl"),
            (("hf:a", "hf:a::train"), "hf:a and as hf:a::train"),
        )
    ),
    (lambda folder: prepare(DataConfig(), Path(__file__)), r"test_refusals\.py can't be made a directory", ""),
    (lambda folder: resolve(DataConfig(prepared=folder)), r"has no index\.json", ""),
    *(
        (lambda _, f=field, v=value: Sampler(**{"num_windows": 10, "global_batch": 6} | {f: v}), field, field)
        for field, value in (("num_windows", 0), ("global_batch", 0), ("seed", -1), ("seed", 2**64))
    ),
    (
        lambda _: Sampler(num_windows=10, global_batch=4).windows(1, num_replicas=3),
        "global_batch=4 must be a multiple of num_replicas=3 times the 1 processes",
        "global_batch num_replicas",
    ),
    (lambda _: SlotSampler(num_windows=0), "num_windows=0 must be at least 1", "num_windows"),
    (lambda _: SlotSampler(num_windows=1).windows(0, -1, 1), "first=-1 and count=1 must be 0 or more", ""),
]
REFUSALS = [
    *FIXED,
    *((file(name, content), rf"{name} can't be read: {words}", fields) for name, content, words, fields in FILES),
    *((source(name), words, "") for name, words in SOURCES.items()),
    *((index(before, after), words, None) for before, after, words in INDICES),
    *((config(**fields), words, " ".join(f"data.{name}" for name in fields)) for fields, words in CONFIGS),
]


@pytest.mark.parametrize(("act", "words", "fields"), REFUSALS)
def test_a_mistake_is_refused_by_one_sentence(act, words, fields, tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.data.tokenizers._MOST_FILE_BYTES", 2**16)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as refusal:
        act(tmp_path)
    assert fields is None or " ".join(refusal.value.fields) == fields


@pytest.mark.parametrize(
    ("library", "extra", "name"), [("datasets", "hub", "hf:allenai/c4:en"), ("pyarrow", "data", "a.txt.zst")]
)
def test_a_missing_library_says_how_to_install_it(library, extra, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt.zst").touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"pip install 'diloco\[{extra}\]'"):
        list(documents(name))
