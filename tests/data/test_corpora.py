import codecs
import gzip
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tests import memory

from diloco.data.corpora import content, documents, file_digest, fingerprint
from diloco.data.readers import Document, Reading
from diloco.errors import UserError

ROWS = [{"text": "one\r\ntwo\u2028three"}, {"text": "", "id": "empty"}, {"text": "né", "id": 7}]
EXPECTED = [Document("a.jsonl:1", ROWS[0]["text"]), Document("empty", ""), Document("a.jsonl:3", "né")]


def jsonl(rows=ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_stdlib_is_the_running_pythons():
    texts = {document.id: document.text for document in documents("stdlib")}
    root = Path(sysconfig.get_path("stdlib"))
    assert texts["json/decoder.py"] == (root / "json/decoder.py").read_text()
    assert len(texts) > 500
    assert list(texts) == sorted(texts, key=lambda name: Path(name).parts)
    directories = {part for name in texts for part in Path(name).parts[:-1]}
    assert directories.isdisjoint({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})


def test_stdlib_skips_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"# \xff")
    (tmp_path / "b.py").write_bytes(b"# ok\r\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert list(documents("stdlib")) == [Document("b.py", "# ok\r\n")]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_and_jsonl_plain_and_compressed(tmp_path, suffix):
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(jsonl()))
    (tmp_path / f"a.txt{suffix}").write_bytes(compress("line\r\nnéxt\n".encode()))
    records = list(documents(str(tmp_path / f"a.jsonl{suffix}")))
    assert records == [Document(d.id.replace("a.jsonl", f"a.jsonl{suffix}"), d.text) for d in EXPECTED]
    assert list(documents(str(tmp_path / f"*.txt{suffix}"))) == [Document(f"a.txt{suffix}", "line\r\nnéxt\n")]


def test_parquet_streams_all_row_groups(tmp_path):
    table = pyarrow.table({"other": [1, 2, 3], "text": ["a", "b", "c"], "id": ["x", None, "z"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    records = list(documents(str(tmp_path / "a.parquet")))
    assert records == [Document("x", "a"), Document("a.parquet:2", "b"), Document("z", "c")]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_several_compressed_streams_in_one_file_are_all_read(tmp_path, compress):
    path = tmp_path / {gzip.compress: "a.jsonl.gz"}.get(compress, "a.jsonl.zst")
    path.write_bytes(compress(jsonl(ROWS[:1])) + compress(jsonl(ROWS[1:])))
    assert [document.text for document in documents(str(path))] == [row["text"] for row in ROWS]


def test_globs_are_sorted_and_ids_do_not_depend_on_where_they_lie(tmp_path, monkeypatch):
    for root in ("here", "there"):
        for name in ("b.txt", "a.txt", "deep/er/c.txt"):
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    expected = [Document(name, name) for name in ("a.txt", "b.txt", "deep/er/c.txt")]
    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path / "here")
    assert list(documents(f"{tmp_path}/here/**/*.txt")) == expected
    assert list(documents("~/**/*.txt")) == expected
    assert list(documents("**/*.txt")) == expected
    assert list(documents("deep/er/c.txt")) == [Document("c.txt", "deep/er/c.txt")]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert list(documents(str(tmp_path / "a[1].txt"))) == [Document("a[1].txt", "text")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"a\.jsonl can't be read: line 2 has no field `text`"),
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', r"a\.jsonl can't be read: line 2 is not JSON"),
        ("a.jsonl", b"[]\n", r"a\.jsonl can't be read: line 1 has no field `text`"),
        ("a.txt", b"\xff", r"a\.txt can't be read: it is no text in UTF-8; convert"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz can't be read"),
        ("a.txt.gz", gzip.compress(random.Random(0).randbytes(9999), mtime=0)[:5000], r"a\.txt\.gz can't be read"),
        ("a.txt.zst", b"no zstd at all", r"a\.txt\.zst can't be read"),
        ("a.txt.zst", zstandard.compress(b"x" * 99)[:-3], r"a\.txt\.zst can't be read: Truncated"),
        ("a.parquet", b"no parquet", r"a\.parquet can't be read"),
        ("a.md", b"", r"a\.md has none of the known suffixes: \.txt, .*\.csv, .*\.parquet"),
        ("a.parquet.gz", b"", r"a\.parquet\.gz has none of the known suffixes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(documents(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", jsonl([{"text": "x"}, {"text": "x" * 100}]), "line 2"),
        ("a.txt", b"x" * 101, "the text"),
        ("a.txt.gz", gzip.compress(b"x" * 101, mtime=0), "the text"),
    ],
)
def test_a_document_that_is_too_long_names_the_place_and_the_setting(tmp_path, name, content, place):
    (tmp_path / name).write_bytes(content)
    message = (
        rf"{name} can't be read: {place} is longer than data\.max_document_bytes=100: cut it into documents, or"
    )
    with pytest.raises(UserError, match=message) as refusal:
        list(documents(str(tmp_path / name), Reading(longest_bytes=100)))
    assert refusal.value.fields == ("data.max_document_bytes",)
    read = list(documents(str(tmp_path / name), Reading(longest_bytes=200)))
    assert len(read) == (2 if name == "a.jsonl" else 1)


def test_a_text_of_parquet_that_is_too_long_names_its_row(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b" * 101]}), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r"a\.parquet can't be read: row 2 is longer than data\.max_document_bytes=100"
    ):
        list(documents(str(tmp_path / "a.parquet"), Reading(longest_bytes=100)))


def test_a_long_line_is_read_as_a_short_one(tmp_path):
    rows = [{"id": i, "text": "né\u2028" + "x" * 2**20, "other": [1, {"a": None}]} for i in ("one", 2, None)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    read = list(documents(str(tmp_path / "a.jsonl")))
    assert read == [Document(name, rows[0]["text"]) for name in ("one", "a.jsonl:2", "a.jsonl:3")]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x", "n": ' + b"[" * 2**21 + b"\n")
    with pytest.raises(UserError, match=r"b\.jsonl can't be read: line 1 is not JSON: .* nested too deep"):
        list(documents(str(tmp_path / "b.jsonl")))


def test_an_unknown_suffix_is_refused_before_anything_is_read(tmp_path):
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text("text")
    with pytest.raises(UserError, match=r"b\.md has none of the known suffixes"):
        documents(f"{tmp_path}/*")


def test_a_parquet_file_without_text(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"null\.parquet can't be read: row 2 has no field `text`"):
        list(documents(str(tmp_path / "null.parquet")))
    with pytest.raises(UserError, match=r"none\.parquet can't be read: .*no field `text`"):
        list(documents(str(tmp_path / "none.parquet")))


@pytest.mark.parametrize("source", ["absent.txt", "*.txt", "absent/**/*.jsonl"])
def test_no_match_names_the_pattern_before_anything_is_read(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="matches no file"):
        documents(source)


@pytest.mark.parametrize("source", ["https://host/a.jsonl", "s3://bucket/texts/*.txt"])
def test_a_url_is_refused_with_the_way_to_its_text(source):
    with pytest.raises(UserError, match=r"is a URL, .*: download it, or name a data set .* by hf:NAME$"):
        documents(source)


@pytest.mark.parametrize("source", ["**.txt", "~nobody-of-that-name/a.txt"])
def test_a_pattern_that_is_none_is_refused(source):
    with pytest.raises(UserError, match=r"can't be looked up|home directory"):
        documents(source)


def test_a_directory_stands_for_the_files_in_it_that_can_be_read(tmp_path):
    names = [
        "b.txt",
        "deep/er/a.txt",
        "deep/README",
        "deep/notes.md",
        ".git/c.txt",
        "deep/.d.txt",
        "empty.txt/e.txt",
    ]
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    expected = [Document(name, name) for name in ("b.txt", "deep/er/a.txt", "empty.txt/e.txt")]
    assert list(documents(str(tmp_path / "texts"))) == expected
    assert [name for name, *_ in fingerprint(str(tmp_path / "texts"))] == [document.id for document in expected]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"the directory .*none holds no file with a known suffix: \.txt"):
        documents(str(tmp_path / "none"))
    with pytest.raises(UserError, match="a source of text is empty"):
        documents("")


def test_a_missing_library_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install '.\[data\]' in diloco's clone"):
        list(documents(str(tmp_path / "a.txt.zst")))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install '.\[hub\]' in diloco's clone"):
        list(documents("hf:allenai/c4:en"))


def test_a_dataset_of_the_hub_without_text_is_refused_with_the_field_that_names_it(tmp_path, monkeypatch):
    library = SimpleNamespace(load_dataset=lambda *_, **options: [{"content": "a"}])
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(UserError, match=r"row 1 has no field `text` .* but `content`: name one in") as error:
        list(documents(f"hf:{tmp_path}"))
    assert error.value.fields == ("data.text_field",)


@pytest.mark.slow
def test_the_hub_library_streams_a_local_dataset(tmp_path):
    data = tmp_path / "dataset"
    data.mkdir()
    rows = [{"text": "a", "id": "first"}, {"text": "b", "id": "second"}]
    (data / "train.jsonl").write_bytes(jsonl(rows))
    (data / "validation.jsonl").write_bytes(jsonl([{"text": "v"}]))
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").touch()
    names = (f"{data}", f"{data}::validation", f"{tmp_path}/absent", f"{data}::absent", f"{tmp_path}/scripted")
    results = read_offline(tmp_path, *(f"hf:{name}" for name in names))
    assert results[0] == [["first", "a"], ["second", "b"]]
    assert results[1] == [[f"hf:{data}::validation:1", "v"]]
    assert "absent' can't be read: " in results[2] and "can't be read: " in results[3]
    assert (
        "is loaded by a script of its own, which the library `datasets` refuses: download its files" in results[4]
    )


def read_offline(tmp_path, *sources):
    program = """
import json, sys
from diloco.data.corpora import documents
def read(source):
    try:
        return [[document.id, document.text] for document in documents(source)]
    except ValueError as error:
        return str(error)
print(json.dumps([read(source) for source in sys.argv[1:]]))
"""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program, *sources]
    result = subprocess.run(command, env=os.environ | offline, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("source", ["hf:", "hf::en", "hf:a:b:", "hf:a:b:c:d"])
def test_a_malformed_hub_source(source):
    with pytest.raises(UserError, match=r"is not of the form hf:NAME"):
        list(documents(source))


def test_a_fingerprint_changes_with_the_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = fingerprint(str(path))
    assert before == fingerprint(str(tmp_path / "*.txt"))
    os.utime(path, ns=(0, 0))
    assert fingerprint(str(path)) == [["a.txt", 3, 0]] != before
    assert fingerprint("stdlib") == [platform.python_version()]
    assert fingerprint("hf:allenai/c4:en") == []


def test_content_is_the_same_wherever_the_files_lie(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("one")
    here, there = (content(f"{tmp_path}/{folder}/*.txt") for folder in ("here", "there"))
    assert here == there == [["a.txt", hashlib.sha256(b"one").hexdigest()]]
    (tmp_path / "here/a.txt").write_text("another")
    assert file_digest(tmp_path / "here/a.txt") == hashlib.sha256(b"another").hexdigest()


def test_fields_that_are_not_kept_take_no_memory(tmp_path):
    path = tmp_path / "values.jsonl"
    path.write_bytes(b'{"text": "a", "n": [' + b"[]," * 500_000 + b"[]]}\n")
    with memory.at_most(8 << 20):  # 500,000 lists take more than 30 MB
        assert [document.text for document in documents(str(path), Reading(longest_bytes=1 << 21))] == ["a"]


def test_a_dataset_that_lies_here_changes_with_its_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/train.jsonl").write_text("{}")
    source = f"hf:{tmp_path}"
    before = fingerprint(source), content(source)
    assert before[1] == [source, ["deep/train.jsonl", hashlib.sha256(b"{}").hexdigest()]]
    (tmp_path / "deep/train.jsonl").write_text("{}\n{}")
    after = fingerprint(source), content(source)
    assert after[0] != before[0] and after[1] != before[1]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/lock").touch()
    assert (fingerprint(source), content(source)) == after, "hidden files are no text"


@pytest.mark.parametrize("pattern", ["", "/**/*.txt", "/*/*.txt"])
def test_directories_behind_links_are_read_once(tmp_path, pattern):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b.txt").write_text("b")
    (tmp_path / "texts/deep").mkdir(parents=True)
    (tmp_path / "texts/deep/a.txt").write_text("a")
    (tmp_path / "texts/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/circle").symlink_to(tmp_path / "texts")
    read = [document.id for document in documents(f"{tmp_path}/texts{pattern}")]
    assert read == ["deep/a.txt", "linked/b.txt"]


def test_a_directory_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    for name in ("a.txt", "closed/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    scan = os.scandir

    def closed(path):  # root reads all
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    for source in (tmp_path, tmp_path / "**/*.txt"):
        with pytest.raises(UserError, match=r"can't be looked up: .*Permission denied.*closed"):
            documents(str(source))


def test_a_byte_order_mark_and_blank_lines_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"hello")
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "one"}\n\n \n{"text": "two"}\n\n')
    read = [*documents(f"{tmp_path}/a.txt"), *documents(f"{tmp_path}/b.jsonl")]
    assert read == [Document("a.txt", "hello"), Document("b.jsonl:1", "one"), Document("b.jsonl:4", "two")]


def test_two_columns_of_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,text\none,two\n")
    column = pyarrow.array(["one"])
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([column, column], ["text"] * 2), tmp_path / "b.parquet")
    for name in ("a.csv", "b.parquet"):
        with pytest.raises(
            UserError, match=rf"{name} can't be read: .* several columns `text`: rename all but one"
        ):
            list(documents(str(tmp_path / name)))
