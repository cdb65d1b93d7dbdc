"""Files of text, tokenizers and prepared directories that somebody damaged, and those that unpack to much."""

import gzip
import io
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import settings
from tests.hostile.mutations import generator, mutated_bytes

from diloco.data.config import DataConfig
from diloco.data.corpora import documents
from diloco.data.prepare import prepare
from diloco.data.readers import Document, Reading
from diloco.data.shards import open_split
from diloco.data.tokenizers import load_tokenizer, train_bpe
from diloco.errors import UserError
from diloco.evaluation.questions import read_questions

ROWS = b"".join(
    json.dumps({"id": f"d{i}", "text": f"text {i} é\u6f22", "n": [i]}).encode() + b"\n" for i in range(9)
)
CSV = b"id,text\n" + b"".join(f'd{i},"text ""{i}"",\n\u00e9"\n'.encode() for i in range(9))
QUESTION = b'{"query": "a", "choices": ["b", "c"], "gold": 0}\n'


def parquet() -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table({"text": ["one", "two", "é" * 99] * 20, "id": ["x", None, "z"] * 20})
    pyarrow.parquet.write_table(table, buffer, compression="gzip", row_group_size=25)
    return buffer.getvalue()


def mutations(content: bytes, seed: int) -> Iterator[bytes]:
    """As many damaged copies as the profile asks for."""
    rng = generator(seed)
    for _ in range(settings.get_profile("hostile").max_examples):
        yield mutated_bytes(content, rng)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", ROWS),
        ("a.txt", ROWS),
        ("a.csv", CSV),
        ("a.jsonl.gz", gzip.compress(ROWS, mtime=0)),
        ("a.jsonl.zst", zstandard.compress(ROWS)),
        ("a.parquet", parquet()),
    ],
)
def test_damaged_text_is_read_or_refused_by_its_file(tmp_path, name, content):
    path = tmp_path / name
    for damaged in mutations(content, 1):
        path.write_bytes(damaged)
        try:
            read = list(documents(str(path), Reading(longest_bytes=4096)))
        except UserError as error:
            assert str(error).startswith(str(path))
        else:
            assert all(isinstance(document, Document) and isinstance(document.text, str) for document in read)


@pytest.mark.parametrize("suffix", [".json", ".model"])
def test_a_damaged_tokenizer_is_loaded_or_refused(tmp_path, suffix):
    path = tmp_path / f"tokenizer{suffix}"
    write_tokenizer(path)
    for damaged in mutations(path.read_bytes(), 3):
        path.write_bytes(damaged)
        try:
            tokenizer = load_tokenizer(path)
            ids = tokenizer.encode(["one two", "é"])
            tokenizer.decode(ids[0])
        except UserError as error:
            assert "tokenizer" in str(error)
        else:
            assert max(map(max, filter(len, ids)), default=0) < tokenizer.vocab_size


def write_tokenizer(path: Path) -> None:
    if path.suffix == ".json":
        train_bpe(["one two three é"] * 9, 260, path)
        return
    import sentencepiece

    model = io.BytesIO()
    lines = (f"line {i} of some words to learn from" for i in range(99))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=36, minloglevel=9
    )
    path.write_bytes(model.getvalue())


def test_a_damaged_index_or_file_of_questions_is_read_or_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    directory = prepare(DataConfig(train=(f"{tmp_path}/a.jsonl",), held_out_fraction=0.3), tmp_path / "out")
    for damaged in mutations((directory / "index.json").read_bytes(), 4):
        (directory / "index.json").write_bytes(damaged)
        try:
            split = open_split(directory, "train")
            window = split.window(0, 4)
        except UserError as error:
            assert "prepare" in str(error)
        else:
            assert window.max() < split.vocab_size and split.num_bytes >= 0
    for damaged in mutations(QUESTION * 3, 5):
        (tmp_path / "questions.jsonl").write_bytes(damaged)
        try:
            questions = read_questions(tmp_path / "questions.jsonl")
        except UserError as error:
            assert "questions.jsonl" in str(error)
        else:
            assert all(0 <= question["gold"] < len(question["choices"]) for question in questions)


READING = """
import resource, sys
from pathlib import Path
from diloco.data.corpora import documents
from diloco.data.readers import Reading
import pyarrow

mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**26, resource.getrlimit(resource.RLIMIT_AS)[1]))
for source in sys.argv[1:]:
    try:
        print(len(next(documents(source, Reading(longest_bytes=2**20))).text))
    except BaseException as error:
        print(type(error).__name__, str(error)[:300].replace("\\n", " "))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits address space")
def test_what_unpacks_to_much_takes_little_memory(tmp_path):
    row = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    bombs = {
        "line.jsonl.gz": zipped([b'{"text": "', *[b"x" * 2**20] * 80, b'"}\n']),
        "text.txt.gz": zipped([b"x" * 2**20] * 80),
        "lines.jsonl.gz": zipped([row * 1000] * 100),
        "text.txt.zst": zstandard.compress(b"x" * (80 * 2**20)),
        "line.jsonl": b'{"text": "' + b"x" * (80 * 2**20) + b'"}\n',
        "deep.jsonl": b'{"text": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "field.csv.gz": zipped([b'text\n"', *[b"x\n" * (2**20 // 2)] * 80, b'"\n']),
    }
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", READING, *(str(tmp_path / name) for name in bombs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    outcomes = dict(zip(bombs, done.stdout.splitlines(), strict=True))
    too_long = "is longer than data.max_document_bytes=1048576: cut it into documents, or raise that"
    for name, place in (("line.jsonl.gz", "line 1"), ("text.txt.gz", "the text"), ("text.txt.zst", "the text")):
        assert outcomes[name] == f"FileError {tmp_path / name} can't be read: {place} {too_long}"
    assert outcomes["field.csv.gz"] == f"FileError {tmp_path}/field.csv.gz can't be read: row 1 {too_long}"
    assert outcomes["line.jsonl"] == f"FileError {tmp_path}/line.jsonl can't be read: line 1 {too_long}"
    assert outcomes["lines.jsonl.gz"] == "1000"
    assert outcomes["deep.jsonl"].endswith("line 1 is not JSON: its lists and objects are nested too deep")


def zipped(pieces: list[bytes]) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join([*map(packer.compress, pieces), packer.flush()])
