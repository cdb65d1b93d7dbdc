import gzip
import json

import pytest

from diloco.data.config import DataConfig
from diloco.data.corpora import documents
from diloco.data.prepare import prepare
from diloco.data.shards import read_index
from diloco.data.splits import SplitDocuments, check_disjoint, is_held_out
from diloco.errors import UserError


def write_rows(path, texts, prefix="doc"):
    rows = [{"id": f"{prefix}{i}", "text": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts_of(split, **fields):
    return [document.text for name, document in SplitDocuments(DataConfig(**fields)) if name == split]


def test_a_document_stays_in_its_split_whatever_is_beside_it(tmp_path):
    texts = [f"text {i}" for i in range(300)]
    everything = write_rows(tmp_path / "everything.jsonl", texts)
    lines = (tmp_path / "everything.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines[:150])))
    held_out = set(texts_of("held_out", train=(everything,), held_out_fraction=0.1))
    fewer = texts_of("held_out", train=(str(tmp_path / "reversed.jsonl"),), held_out_fraction=0.1)
    assert set(fewer) == held_out & set(texts[:150])
    assert 15 <= len(held_out) <= 45


def test_held_out_sources_take_no_training_document(tmp_path):
    train = tuple(write_rows(tmp_path / f"{name}.jsonl", [name] * 40, name) for name in ("a", "b"))
    held_out = (write_rows(tmp_path / "held_out.jsonl", ["h"] * 3),)
    assert texts_of("train", train=train, held_out=held_out) == ["a"] * 40 + ["b"] * 40
    assert texts_of("held_out", train=train, held_out=held_out) == ["h"] * 3


def test_training_text_is_read_up_to_so_many_bytes_and_held_out_text_whole(tmp_path):
    texts = [f"document {i}: né漢\n" * (i % 7) for i in range(200)]
    source = write_rows(tmp_path / "rows.jsonl", texts)
    other = write_rows(tmp_path / "other.jsonl", ["held out"] * 3, prefix="other")
    least = next(n for n in range(200) if sum(len(text.encode()) for text in texts[:n]) >= 1000)
    limited = {"train": (source, source), "held_out": (other,), "max_train_bytes": 1000}
    assert texts_of("train", **limited) == texts[:least]
    assert texts_of("held_out", **limited) == ["held out"] * 3
    # With a fraction held out, as much is read, and what is held out of it is the same as without a limit.
    fraction = {"train": (source,), "held_out_fraction": 0.2}
    parts = {split: texts_of(split, **fraction, max_train_bytes=1000) for split in ("train", "held_out")}
    read = parts["train"] + parts["held_out"]
    assert sorted(read) == sorted(texts[: len(read)]) and len(read) > least
    for split, part in parts.items():
        assert texts_of(split, **fraction)[: len(part)] == part


@pytest.mark.parametrize("kind", ["empty", "held out"])
def test_reading_ends_where_hardly_any_document_is_to_be_trained_on(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("diloco.data.splits._MOST_EXTRA_BYTES", 2**16)
    out = next(f"doc{i}" for i in range(10_000) if is_held_out(f"doc{i}", 0.02))
    row = {"text": ""} if kind == "empty" else {"id": out, "text": "y" * 1000}
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines([json.dumps(row) + "\n"] * 5000)
    config = DataConfig(train=(str(tmp_path / "rows.jsonl.gz"),), max_train_bytes=1000)
    read = []

    def documents_counted(*arguments):
        for document in documents(*arguments):
            read.append(document)
            yield document

    monkeypatch.setattr("diloco.data.splits.documents", documents_counted)
    with pytest.raises(UserError, match="max_train_bytes=1000: more than a hundred times") as refusal:
        list(SplitDocuments(config))
    assert refusal.value.fields == ("data.max_train_bytes", "data.train")
    assert 100 <= len(read) <= 1000


def test_a_source_is_not_both_trained_on_and_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_rows(tmp_path / "rows.jsonl", ["x"])
    for train, held_out in (("*.jsonl", source), (source, "./rows.jsonl"), ("hf:a", "hf:a::train")):
        with pytest.raises(UserError, match=r"leave it out of data.held_out or data.train") as refusal:
            check_disjoint(DataConfig(train=(train,), held_out=(held_out,)))
        assert refusal.value.fields == ("data.held_out", "data.train")


def test_the_end_of_each_document_is_held_out_where_hashing_would_leave_a_split_empty(tmp_path):
    """A single text, such as one .txt file; with a second document in the other split, both stay whole."""
    (tmp_path / "text.txt").write_text("né" * 100)
    train = (str(tmp_path / "text.txt"),)
    assert texts_of("train", train=train, held_out_fraction=0.1) == ["né" * 90]
    assert texts_of("held_out", train=train, held_out_fraction=0.1) == ["né" * 10]
    for prefix, is_whole in (("line", True), ("row", False)):
        rows = write_rows(tmp_path / f"{prefix}.jsonl", ["one" * 10, "two" * 10, ""], prefix)
        ids = [is_held_out(f"{prefix}{i}", 0.2) for i in range(3)]
        assert any(ids) is is_whole, ids
        lengths = {
            split: sum(map(len, texts_of(split, train=(rows,), held_out_fraction=0.2)))
            for split in ("train", "held_out")
        }
        assert lengths == ({"train": 30, "held_out": 30} if is_whole else {"train": 48, "held_out": 12})
        directory = prepare(DataConfig(train=(rows,), held_out_fraction=0.2), tmp_path / prefix)
        assert read_index(directory).held_out_by_position is not is_whole


@pytest.mark.parametrize(
    ("texts", "tokenizer", "most_ahead_bytes", "num_readings"),
    [
        (["one text " * 100], "bytes", 2**24, 1),
        (["one text " * 100], "bpe:260", 2**24, 2),  # the tokenizer is trained on it
        (["one text " * 100], "bytes", 10, 1),
        (["one"] * 3, "bytes", 10, 2),
        (["one"] * 300, "bytes", 2**24, 1),
    ],
)
def test_a_preparation_reads_each_document_once(
    tmp_path, monkeypatch, texts, tokenizer, most_ahead_bytes, num_readings
):
    source = write_rows(tmp_path / "rows.jsonl", texts)
    read = []

    def documents_counted(*arguments):
        for document in documents(*arguments):
            read.append(document.id)
            yield document

    monkeypatch.setattr("diloco.data.splits.documents", documents_counted)
    monkeypatch.setattr("diloco.data.splits._MOST_AHEAD_BYTES", most_ahead_bytes)
    config = DataConfig(train=(source,), held_out_fraction=0.2, tokenizer=tokenizer)
    index = read_index(prepare(config, tmp_path / "out"))
    assert sorted(read) == sorted([f"doc{i}" for i in range(len(texts))] * num_readings)
    num_bytes = sum(shard.num_bytes for shards in index.splits.values() for shard in shards)
    assert num_bytes == sum(map(len, texts)), "each is in one split, or cut into both"


def test_a_limit_counts_bytes_where_it_is_decided_how_documents_are_split(tmp_path):
    """The limit ends before the first document that hashing would hold out, though not in characters."""
    out = next(i for i in range(100) if is_held_out(f"doc{i}", 0.2))
    assert out > 3
    source = write_rows(tmp_path / "rows.jsonl", ["漢" * 100] * (out + 1))
    config = DataConfig(train=(source,), held_out_fraction=0.2, max_train_bytes=300 * out - 1)
    assert read_index(prepare(config, tmp_path / "out")).held_out_by_position


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        ([], ["x"], r"data.train=.*/train\.jsonl holds no text: name other sources"),
        (["x"], [""] * 50, r"data.held_out=.*/held_out\.jsonl holds no text: name other sources"),
        (["x"], [], r"data.held_out=.*/held_out\.jsonl holds no text: name other sources"),
        ([], None, r"data.train=.*/train\.jsonl holds no text"),
        (["x"], None, r"data.held_out_fraction=0\.02 holds out none of the text of data.train=.*: raise it"),
    ],
)
def test_an_empty_split_is_refused(tmp_path, train, held_out, message):
    sources = {"train": (write_rows(tmp_path / "train.jsonl", train),)}
    if held_out is not None:
        sources["held_out"] = (write_rows(tmp_path / "held_out.jsonl", held_out),)
    with pytest.raises(UserError, match=message):
        prepare(DataConfig(**sources), tmp_path / "out")
    assert not (tmp_path / "out/index.json").exists()


def test_an_empty_document_is_no_held_out_text(tmp_path):
    empty = next(i for i in range(1000) if is_held_out(f"doc{i}", 0.01))
    texts = [
        "" if i == empty else "text" for i in range(empty + 2) if i == empty or not is_held_out(f"doc{i}", 0.01)
    ]
    ids = [i for i in range(empty + 2) if i == empty or not is_held_out(f"doc{i}", 0.01)]
    rows = [{"id": f"doc{i}", "text": text * 100} for i, text in zip(ids, texts, strict=True)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = texts_of("held_out", train=(str(path),), held_out_fraction=0.01)
    assert held_out == ["text"] * (len(ids) - 1), "the end of each document"
