import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.data.corpora import content, documents, file_digest, fingerprint, left_out
from diloco.data.readers import Document
from diloco.errors import UserError


@pytest.mark.slow
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
    (tmp_path / "a[1].txt").write_text("looks like a glob")
    assert list(documents(str(tmp_path / "a[1].txt"))) == [Document("a[1].txt", "looks like a glob")]


def test_a_directory_stands_for_the_files_in_it_that_can_be_read(tmp_path):
    others = ["deep/README", "deep/notes.md", ".git/c.txt", "deep/.d.txt"]
    for name in ["b.txt", "deep/er/A.TXT", *others, "empty.txt/e.txt"]:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    expected = [Document(name, name) for name in ("b.txt", "deep/er/A.TXT", "empty.txt/e.txt")]
    assert list(documents(str(tmp_path / "texts"))) == expected
    assert left_out(str(tmp_path / "texts")) == ["deep/README", "deep/notes.md"]
    assert [name for name, *_ in fingerprint(str(tmp_path / "texts"))] == [document.id for document in expected]


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
    (data / "train.jsonl").write_text('{"text": "a", "id": "first"}\n{"text": "b", "id": "second"}\n')
    (data / "validation.jsonl").write_text('{"text": "v"}\n')
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


def test_a_fingerprint_changes_with_the_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = fingerprint(str(path))
    assert before == fingerprint(str(tmp_path / "*.txt"))
    os.utime(path, ns=(0, 0))
    assert fingerprint(str(path)) == [["a.txt", 3, 0]] != before
    assert fingerprint("stdlib") == ["stdlib", platform.python_version()]
    assert fingerprint("hf:allenai/c4:en") == ["hf:allenai/c4:en"]


def test_content_is_the_same_wherever_the_files_lie(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("one")
    here, there = (content(f"{tmp_path}/{folder}/*.txt") for folder in ("here", "there"))
    assert here == there == [["a.txt", hashlib.sha256(b"one").hexdigest()]]
    (tmp_path / "here/a.txt").write_text("another")
    assert file_digest(tmp_path / "here/a.txt") == hashlib.sha256(b"another").hexdigest()


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


@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/**/*.jsonl"])
def test_a_link_that_leads_to_nothing_is_named(tmp_path, pattern):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "readme").symlink_to(tmp_path / "absent")
    assert [document.text for document in documents(f"{tmp_path}{pattern}")] == ["a"]
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "unmounted/b.jsonl")
    with pytest.raises(UserError, match=r"can't be looked up: .*No such file.*/b\.jsonl"):
        documents(f"{tmp_path}{pattern}")
