import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tests.data.corpora import as_parquet, write_rows

from diloco.data import prepare as prepare_module
from diloco.data import readers
from diloco.data.config import DataConfig
from diloco.data.corpora import documents, is_held_out, is_held_out_by_position, split_documents
from diloco.data.prepare import (
    PrepareProgress,
    prepare,
    resolve,
)
from diloco.data.shards import INDEX_FILE, SPLITS, open_split, read_index, shard_path
from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared/data"
TOKENIZERS = {
    "dolma": SHARED / "tokenizers/gpt-neox-olmo-dolma-v1_5.json",
    "sentencepiece": SHARED / "tokenizers/sentencepiece_cc_all.32000.100extra.model",
}


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", [f"document {i}: né漢\n" * (i % 7) for i in range(70)])


def split_of(directory, split):
    """The documents of a split, token by token, from its files alone."""
    index = read_index(directory)
    arrays = []
    for number, shard in enumerate(index.splits[split]):
        tokens = np.fromfile(shard_path(directory, split, number, ".bin"), dtype=index.dtype)
        starts = np.fromfile(shard_path(directory, split, number, ".idx"), dtype="<i8")
        assert (len(tokens), len(starts)) == (shard.num_tokens, shard.num_documents)
        assert (tokens[starts] == index.bos_id).all()
        assert (tokens == index.bos_id).sum() == len(starts)
        assert starts[0] == 0
        arrays += np.split(tokens, starts[1:])
    return arrays


def texts_of(directory, split):
    tokenizer = load_tokenizer(directory)
    return [tokenizer.decode(tokens) for tokens in split_of(directory, split)]


@pytest.mark.parametrize("shard_tokens", [1, 500, 2**26])
def test_shards_reproduce_the_documents_of_each_split(source, tmp_path, shard_tokens):
    directory = prepare(
        DataConfig(train=(source,), held_out_fraction=0.2), tmp_path / "out", shard_tokens=shard_tokens
    )
    expected = {split: [] for split in SPLITS}
    for document in documents(source):
        expected["held_out" if is_held_out(document.id, 0.2) else "train"].append(document.text)
    assert {split: texts_of(directory, split) for split in SPLITS} == expected
    for split in SPLITS:
        opened = open_split(directory, split)
        assert opened.num_bytes == sum(len(text.encode()) for text in expected[split])
        shards = read_index(directory).splits[split]
        assert all(shard.num_tokens >= shard_tokens for shard in shards[:-1])
        assert len(shards) == len(expected[split]) if shard_tokens == 1 else len(shards) < len(expected[split])


def test_what_is_left_out_of_a_directory_is_named_once(tmp_path, caplog):
    (tmp_path / "texts").mkdir()
    texts = [f"text {number}" for number in range(70)]
    write_rows(tmp_path / "texts" / "A.JSONL", [*texts, None, None])
    for name in ("b.json", "c.tsv", ".hidden"):
        (tmp_path / "texts" / name).write_text("[]")
    config = DataConfig(train=(str(tmp_path / "texts"),), held_out_fraction=0.2, skip_null=True)
    directory = prepare(config, tmp_path / "out")
    assert sorted(text for split in SPLITS for text in texts_of(directory, split)) == sorted(texts)
    assert caplog.messages == [
        f"2 of the files in {tmp_path}/texts are left out, since they have none of the suffixes .txt, .txt.gz, "
        ".txt.zst, .jsonl, .jsonl.gz, .jsonl.zst, .csv, .csv.gz, .csv.zst, .parquet: b.json, c.tsv",
        "2 rows whose text is null are left out of A.JSONL",
    ]
    prepare(config, tmp_path / "out")
    assert len(caplog.messages) == 2
    with pytest.raises(UserError, match=r"data\.skip_null=True, not data\.skip_null=False"):
        prepare(replace(config, skip_null=False), tmp_path / "out")


def test_a_name_that_is_not_utf8_is_refused_and_a_directory_with_it_is_read(tmp_path):
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    texts = [f"text {number}" for number in range(70)]
    source = write_rows(folder / os.fsdecode(b"caf\xe9.jsonl"), texts)
    (folder / os.fsdecode(b"\xe9.parquet")).write_bytes(as_parquet({"text": texts}))
    (folder / os.fsdecode(b"\xe9.txt.zst")).write_bytes(zstandard.compress(b"text"))
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"settings\.json can't be written: the name .*caf\\xe9.jsonl is not UTF-8"
        ):
            prepare(DataConfig(train=(source,), held_out_fraction=0.2), out)
    prepare(DataConfig(train=(str(folder),), held_out_fraction=0.2), out)
    read = [text for split in SPLITS for text in texts_of(out, split)]
    assert sorted(read) == sorted([*texts, *texts, "text"])


@pytest.mark.slow
def test_a_locale_without_the_letters_of_a_name_is_named(tmp_path):
    write_rows(tmp_path / "ü.jsonl", [f"text {number}" for number in range(200)])
    command = [sys.executable, "-m", "diloco", "data", "prepare", "--output", "out", "--train", "ü.jsonl"]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    refused = subprocess.run(command, env=os.environ | locale, cwd=tmp_path, capture_output=True, timeout=60)
    sentence = (
        "diloco: out/settings.json can't be written: ?.jsonl has letters that this locale lacks: set PYTHONUTF8=1"
    )
    assert (refused.returncode, refused.stderr.decode()) == (2, f"{sentence} in the environment\n")


def test_the_index_says_what_was_made(source, tmp_path):
    directory = prepare(DataConfig(train=(source,), held_out_fraction=0.2), tmp_path / "out", shard_tokens=500)
    index = read_index(directory)
    files = [shard_path(directory, s, i, ".bin") for s in SPLITS for i in range(len(index.splits[s]))]
    assert index.digest == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert (index.vocab_size, index.bos_id, index.dtype) == (257, 256, "<u2")
    assert index.settings.train == (source,)
    assert not list(directory.glob("*.partial"))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent")
@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_real_tokenizer_is_copied_beside_its_tokens(tmp_path, name):
    books = str(tmp_path / "valid_chapters.jsonl")
    lines = (SHARED / "books/valid_chapters.jsonl").read_text().splitlines(keepends=True)
    Path(books).write_text("".join(lines[:12]))
    config = DataConfig(train=(books,), held_out_fraction=0.3, tokenizer=str(TOKENIZERS[name]))
    directory = prepare(config, tmp_path / "out", shard_tokens=20_000)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.digest == load_tokenizer(TOKENIZERS[name]).digest == read_index(directory).tokenizer_digest
    expected = [document.text for document in documents(books) if not is_held_out(document.id, 0.3)]
    texts = texts_of(directory, "train")
    assert texts == [tokenizer.decode(ids) for ids in tokenizer.encode(expected)]
    assert sum(a == b for a, b in zip(texts, expected, strict=True)) == (len(texts) if name == "dolma" else 0)


def test_a_large_vocabulary_takes_four_bytes_a_token(source, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: 70_000 + i for i, symbol in enumerate(alphabet)} | {"<bos>": 0}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = DataConfig(train=(source,), held_out_fraction=0.2, tokenizer=str(tmp_path))
    directory = prepare(config, tmp_path / "out")
    assert read_index(directory).dtype == "<u4"
    assert open_split(directory, "train").window(0, 100).max() >= 70_000
    expected = [document.text for document in documents(source) if not is_held_out(document.id, 0.2)]
    assert texts_of(directory, "train") == expected


def test_bpe_is_trained_on_the_training_split_alone(tmp_path, monkeypatch):
    train = write_rows(tmp_path / "train.jsonl", ["abcdefgh " * 50] * 9)
    held_out = write_rows(tmp_path / "held_out.jsonl", ["stuvwxyz " * 50] * 9)
    config = DataConfig(train=(train,), held_out=(held_out,), tokenizer="bpe:264")
    directory = prepare(config, tmp_path / "out")
    learnt, other = load_tokenizer(directory).encode([" abcdefgh", " stuvwxyz"])
    assert len(learnt) == 2
    assert len(other) == 9
    assert texts_of(directory, "held_out") == ["stuvwxyz " * 50] * 9


def test_bpe_training_reads_so_many_bytes_and_no_more(tmp_path, monkeypatch):
    train = write_rows(tmp_path / "train.jsonl", ["né" * 10, "x" * 10])
    held_out = write_rows(tmp_path / "held_out.jsonl", ["h"])
    read = []
    monkeypatch.setattr(prepare_module, "train_bpe", lambda texts, *_: read.extend(texts) or sys.exit())
    for limit, expected in (
        (5, ["nén"]),
        (30, ["né" * 10]),
        (35, ["né" * 10, "x" * 5]),
        (99, ["né" * 10, "x" * 10]),
    ):
        read.clear()
        monkeypatch.setattr(prepare_module, "BPE_TRAINING_BYTES", limit)
        with pytest.raises(SystemExit):
            prepare(DataConfig(train=(train,), held_out=(held_out,), tokenizer="bpe:999"), tmp_path / str(limit))
        assert read == expected


@pytest.mark.parametrize("complete", [True, False])
def test_other_settings_are_refused_by_field_and_values(source, tmp_path, complete):
    settings = {"train": (source,), "held_out_fraction": 0.2}
    directory = prepare(DataConfig(**settings), tmp_path / "out")
    if not complete:
        (directory / "index.json").unlink()

    def refused(message, shard_tokens=2**26, **change):
        with pytest.raises(UserError, match=message):
            prepare(DataConfig(**settings | change), directory, shard_tokens=shard_tokens)

    refused("with data.tokenizer=bytes, not data.tokenizer=bpe:300", tokenizer="bpe:300")
    refused("with data.held_out_fraction=0.2, not data.held_out_fraction=0.5", held_out_fraction=0.5)
    refused(r"with data.train=/.*rows\.jsonl, not data.train=stdlib: ", train=("stdlib",))
    refused("shard_tokens=67108864, not shard_tokens=5", shard_tokens=5)
    with Path(source).open("a") as file:
        file.write('{"text": "more"}\n')
    refused("source_digest")


def test_a_directory_in_which_nothing_was_made_takes_other_settings(source, tmp_path):
    (tmp_path / "tok.json").write_text("{}")
    with pytest.raises(UserError, match=r"tok.json is not a tokenizer.json"):
        prepare(DataConfig(train=(source,), tokenizer=str(tmp_path / "tok.json")), tmp_path / "out")
    directory = prepare(DataConfig(train=(source,), held_out_fraction=0.2), tmp_path / "out")
    assert read_index(directory).settings.tokenizer == "bytes"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "train-00000.bin", "held_out-x", "index.json"]
)
def test_files_of_another_preparation_are_not_taken_for_this_ones(source, tmp_path, name):
    """A preparation writes its settings before any other file, and goes on where these are."""
    output = tmp_path / "out"
    output.mkdir()
    (output / name).write_text("foreign")
    config = DataConfig(train=(source,), held_out_fraction=0.2, tokenizer="bpe:260")
    with pytest.raises(UserError, match="out holds files of another preparation: name another output") as error:
        prepare(config, output)
    assert error.value.field == "output" and (output / name).read_text() == "foreign"
    assert not (output / "settings.json").exists()
    (output / name).rename(output / "notes.txt")
    assert prepare(config, output) == output and (output / "index.json").exists()


def test_progress_counts_up_to_everything(source, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    seen = []
    config = DataConfig(train=(source,), held_out_fraction=0.2, tokenizer="bpe:260")
    directory = prepare(config, tmp_path / "out", shard_tokens=500, progress=seen.append)
    opened = [open_split(directory, split) for split in SPLITS]
    assert seen[0] == PrepareProgress(stage="training the tokenizer")
    assert seen[-1] == PrepareProgress(
        stage="packing",
        num_documents=70,
        num_bytes=sum(split.num_bytes for split in opened),
        num_tokens=sum(split.num_tokens for split in opened),
        fraction=1,
    )
    counts = [progress.num_tokens for progress in seen]
    assert len(counts) > 10
    assert counts == sorted(counts)
    fractions = [progress.fraction for progress in seen[1:]]
    assert fractions == sorted(fractions) and 0 < fractions[0] < 0.1


def test_resolve_prepares_once_for_each_choice(source, tmp_path):
    config = DataConfig(train=(source,), held_out_fraction=0.2, cache=tmp_path / "cache")
    calls = []
    first = resolve(config, progress=calls.append)
    assert calls
    calls.clear()
    assert resolve(config, progress=calls.append) == first
    assert not calls
    other = DataConfig(train=(source,), held_out_fraction=0.3, cache=tmp_path / "cache")
    assert resolve(other).parent == first.parent == tmp_path / "cache"
    assert resolve(other) != first
    with Path(source).open("a") as file:
        file.write('{"text": "more"}\n')
    assert resolve(config) not in (first, resolve(other))


def test_resolve_takes_a_prepared_directory_unless_the_config_contradicts_it(source, tmp_path):
    directory = prepare(DataConfig(train=(source,), held_out_fraction=0.2), tmp_path / "out")
    Path(source).unlink()
    assert resolve(DataConfig(prepared=directory)) == directory
    assert resolve(DataConfig(prepared=directory, train=(source,), held_out_fraction=0.2)) == directory
    for change, words in (
        ({"tokenizer": "bpe:999"}, "data.tokenizer=bpe:999 contradicts data.prepared=.*data.tokenizer=bytes"),
        ({"train": ("a.txt", "b.txt")}, r"data.train=a\.txt b\.txt contradicts data.prepared=.*rows\.jsonl"),
    ):
        with pytest.raises(UserError, match=words):
            resolve(DataConfig(prepared=directory, **change))


def test_a_tokenizer_at_another_place_is_the_same_and_another_is_not(source, tmp_path):
    config = DataConfig(train=(source,), held_out_fraction=0.2, tokenizer="bpe:260")
    trained, other = (
        prepare(replace(config, tokenizer=f"bpe:{size}"), tmp_path / f"{size}") for size in (260, 261)
    )
    named = prepare(replace(config, tokenizer=str(trained / "tokenizer.json")), tmp_path / "out")
    for directory in (trained, named):
        assert resolve(DataConfig(prepared=directory, tokenizer=f"{tmp_path}/out/../260")) == directory
        with pytest.raises(UserError, match=r"data.tokenizer=.*/261 contradicts data.prepared="):
            resolve(DataConfig(prepared=directory, tokenizer=str(other)))


def test_a_tokenizer_that_was_exchanged_is_noticed(source, tmp_path):
    config = DataConfig(train=(source,), held_out_fraction=0.2, tokenizer="bpe:260")
    directory = prepare(config, tmp_path / "out")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match="but the tokens were made with"):
        load_tokenizer(directory)
    path.unlink()
    with pytest.raises(UserError, match="has lost its tokenizer"):
        load_tokenizer(directory)


def test_a_finished_directory_of_somebody_else_is_used_as_it_is(source, tmp_path):
    config = DataConfig(train=(source,))
    output = prepare(config, tmp_path / "out")
    (output / "lock").unlink()
    (output / "lock").mkdir()  # it can't be opened, as in a directory that may not be written to
    assert prepare(config, output) == output
    with pytest.raises(UserError, match=r"was prepared with data\.held_out_fraction="):
        prepare(replace(config, held_out_fraction=0.5), output)
    (output / INDEX_FILE).unlink()
    with pytest.raises(UserError, match=r"out can't be locked, to be written: .*: name another directory"):
        prepare(config, output)


def split_texts(split, **fields):
    config = DataConfig(**fields)
    parts = split_documents(config, by_position=is_held_out_by_position(config))
    return [document.text for name, document in parts if name == split]


def test_a_document_stays_in_its_split_whatever_is_beside_it(tmp_path):
    texts = [f"text {i}" for i in range(300)]
    everything = write_rows(tmp_path / "everything.jsonl", texts)
    lines = (tmp_path / "everything.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines[:150])))
    held_out = set(split_texts("held_out", train=(everything,), held_out_fraction=0.1))
    fewer = split_texts("held_out", train=(str(tmp_path / "reversed.jsonl"),), held_out_fraction=0.1)
    assert set(fewer) == held_out & set(texts[:150])
    assert 15 <= len(held_out) <= 45


def test_held_out_sources_take_no_training_document(tmp_path):
    train = tuple(write_rows(tmp_path / f"{name}.jsonl", [name] * 40, name) for name in ("a", "b"))
    held_out = (write_rows(tmp_path / "held_out.jsonl", ["h"] * 3),)
    assert split_texts("train", train=train, held_out=held_out) == ["a"] * 40 + ["b"] * 40
    assert split_texts("held_out", train=train, held_out=held_out) == ["h"] * 3


def test_training_text_is_read_up_to_so_many_bytes_and_held_out_text_whole(tmp_path):
    texts = [f"document {i}: né漢\n" * (i % 7) for i in range(200)]
    source = write_rows(tmp_path / "rows.jsonl", texts)
    other = write_rows(tmp_path / "other.jsonl", ["held out"] * 3, prefix="other")
    least = next(n for n in range(200) if sum(len(text.encode()) for text in texts[:n]) >= 1000)
    limited = {"train": (source, source), "held_out": (other,), "max_train_bytes": 1000}
    assert split_texts("train", **limited) == texts[:least]
    assert split_texts("held_out", **limited) == ["held out"] * 3
    # With a fraction held out, as much is read, and what is held out of it is the same as without a limit.
    fraction = {"train": (source,), "held_out_fraction": 0.2}
    parts = {split: split_texts(split, **fraction, max_train_bytes=1000) for split in ("train", "held_out")}
    read = parts["train"] + parts["held_out"]
    assert sorted(read) == sorted(texts[: len(read)]) and len(read) > least
    for split, part in parts.items():
        assert split_texts(split, **fraction)[: len(part)] == part


def test_sources_are_mixed_by_weights_until_the_first_of_them_ends(tmp_path, caplog):
    sources = tuple(
        write_rows(tmp_path / f"{name}.jsonl", [name * size for size in sizes], name)
        for name, sizes in (("a", [30] * 60), ("b", [20, 10] * 9), ("c", [50] * 8))
    )
    held_out = write_rows(tmp_path / "held_out.jsonl", ["h"])
    config = DataConfig(train=sources, held_out=(held_out,), weights=(0.5, 0.2, 0.3))
    texts, read = split_texts("train", **asdict(config)), dict.fromkeys("abc", 0)
    for number, text in enumerate(texts, start=1):
        read[text[0]] += len(text)
        total = sum(read.values())
        shares = [read[name] - weight * total for name, weight in zip("abc", config.weights, strict=True)]
        assert max(map(abs, shares)) <= 50, (number, read)
    assert read == {"a": 690, "b": 270, "c": 400}, "the next text would be of c, which has no more"
    directory = prepare(config, tmp_path / "out", shard_tokens=100)
    assert texts_of(directory, "train") == texts
    assert caplog.messages == [f"the training text ends with {sources[2]}, of which data.weights takes no more"]
    limited = prepare(replace(config, max_train_bytes=200), tmp_path / "limited")
    assert texts_of(limited, "train") == texts[:8] and read_index(limited).settings.weights == (0.5, 0.2, 0.3)


def test_the_end_of_each_document_is_held_out_where_hashing_would_leave_a_split_empty(tmp_path):
    """A single text, such as one .txt file; with a second document in the other split, both stay whole."""
    (tmp_path / "text.txt").write_text("né" * 100)
    train = (str(tmp_path / "text.txt"),)
    assert split_texts("train", train=train, held_out_fraction=0.1) == ["né" * 90]
    assert split_texts("held_out", train=train, held_out_fraction=0.1) == ["né" * 10]
    for prefix, is_whole in (("line", True), ("row", False)):
        rows = write_rows(tmp_path / f"{prefix}.jsonl", ["one" * 10, "two" * 10, ""], prefix)
        ids = [is_held_out(f"{prefix}{i}", 0.2) for i in range(3)]
        assert any(ids) is is_whole, ids
        lengths = {
            split: sum(map(len, split_texts(split, train=(rows,), held_out_fraction=0.2)))
            for split in ("train", "held_out")
        }
        assert lengths == ({"train": 30, "held_out": 30} if is_whole else {"train": 48, "held_out": 12})
        directory = prepare(DataConfig(train=(rows,), held_out_fraction=0.2), tmp_path / prefix)
        assert read_index(directory).held_out_by_position is not is_whole


def test_a_limit_counts_bytes_where_it_is_decided_how_documents_are_split(tmp_path):
    """The limit ends before the first document that hashing would hold out, though not in characters."""
    out = next(i for i in range(100) if is_held_out(f"doc{i}", 0.2))
    assert out > 3
    source = write_rows(tmp_path / "rows.jsonl", ["漢" * 100] * (out + 1))
    config = DataConfig(train=(source,), held_out_fraction=0.2, max_train_bytes=300 * out - 1)
    assert read_index(prepare(config, tmp_path / "out")).held_out_by_position


def test_an_empty_document_is_no_held_out_text(tmp_path):
    empty = next(i for i in range(1000) if is_held_out(f"doc{i}", 0.01))
    texts = [
        "" if i == empty else "text" for i in range(empty + 2) if i == empty or not is_held_out(f"doc{i}", 0.01)
    ]
    ids = [i for i in range(empty + 2) if i == empty or not is_held_out(f"doc{i}", 0.01)]
    rows = [{"id": f"doc{i}", "text": text * 100} for i, text in zip(ids, texts, strict=True)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = split_texts("held_out", train=(str(path),), held_out_fraction=0.01)
    assert held_out == ["text"] * (len(ids) - 1), "the end of each document"
