import errno
import hashlib
import importlib
import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.processes import run_main

from diloco.cli.main import main
from diloco.errors import FileError, FileWriteError, UserError, exit_code_of
from diloco.files import copy, make_directory, reading, sha256, write_atomically, write_json, writing


def test_whatever_a_reader_of_a_file_raises_names_the_file():
    for error, words in (
        (OSError(2, "No such file"), "No such file"),
        (zlib.error("Error -3"), "Error -3"),
        (EOFError(), "EOFError"),
        (TypeError("a\n  b"), "a b"),
        (UserError("line 2 has none", "data.text_field"), "line 2 has none"),
    ):
        with pytest.raises(FileError, match=f"^a.txt can't be read: {words}$") as refusal, reading("a.txt", "a"):
            raise error
        assert refusal.value.field == (error.field if isinstance(error, UserError) else "a")


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 64 KiB, of which half is left."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system can't be mounted here")
    (place / "other").write_bytes(bytes(32 << 10))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_file_is_whole_or_absent(tmp_path):
    write_atomically(tmp_path / "a", [b"12", memoryview(b"3")])
    assert (tmp_path / "a").read_bytes() == b"123"
    write_json(tmp_path / "b", {"x": 1})
    assert (tmp_path / "b").read_text() == '{\n  "x": 1\n}\n'

    def fail():
        yield b"1"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "a", fail())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "a").read_bytes() == b"123"


def test_a_full_disk_is_named_with_the_file_and_the_bytes(full_disk, tmp_path):
    path = full_disk / "model.safetensors"
    expected = rf"^can't write {path}: no space left on device \(needs 100,000 bytes\)$"
    with pytest.raises(FileWriteError, match=expected) as refusal:
        write_atomically(path, [bytes(40_000), bytes(60_000)])
    assert exit_code_of(refusal.value) == 1
    assert [file.name for file in full_disk.iterdir()] == ["other"], "nothing is left of it"
    with pytest.raises(FileWriteError, match=expected), writing(path, 100_000):
        safetensors.torch.save_file({"x": torch.zeros(25_000)}, path)
    (tmp_path / "tokenizer.json").write_bytes(bytes(100_000))
    with pytest.raises(FileWriteError, match=r"tokenizer.json: no space left on device \(needs 100,000 bytes\)$"):
        copy(tmp_path / "tokenizer.json", full_disk)


def test_a_digest_is_that_of_files_and_buffers_one_after_another(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"in a file")
    buffers = b"in bytes", memoryview(torch.arange(3).numpy())
    whole = b"".join((*buffers, path.read_bytes()))
    assert sha256(*buffers, path) == hashlib.sha256(whole).hexdigest() != sha256(path, *buffers)


def test_a_place_that_is_no_directory_is_named(tmp_path):
    (tmp_path / "file").touch()
    for write in (
        lambda: make_directory(tmp_path / "file" / "deeper"),
        lambda: write_atomically(tmp_path / "file" / "x", [b""]),
        lambda: write_atomically(tmp_path / "absent" / "x", [b""]),
    ):
        with pytest.raises(FileWriteError, match=rf"can't write {tmp_path}.*: (not a|no such file or) directory$"):
            write()
    with pytest.raises(FileWriteError, match=r"can't write \.: it is a directory"):
        write_atomically(Path(), [b"text"])


def test_an_error_that_names_its_file_is_left_as_it_is():
    with pytest.raises(FileWriteError, match=r"^inner: no"), writing(Path("outer")):
        raise FileWriteError("inner: no")
    with pytest.raises(FileWriteError, match=r"^can't write outer: disk quota exceeded$"), writing(Path("outer")):
        raise OSError(errno.EDQUOT, "")


@pytest.mark.slow
def test_an_export_to_a_full_disk_ends_in_one_sentence(finished_run, full_disk):
    command = ["export", str(finished_run), "--to", "hf", "--output", str(full_disk / "out")]
    process = run_main(main, command, folder=full_disk.parent, timeout_seconds=120)
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert "model.safetensors: no space left on device (needs " in process.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_written(is_there, tmp_path):
    target, link = tmp_path / "other_disk" / "file", tmp_path / "link"
    target.parent.mkdir()
    if is_there:
        target.write_bytes(b"before")
    link.symlink_to("other_disk/file")
    write_atomically(link, [b"after"])
    assert link.is_symlink() and target.read_bytes() == b"after"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_several_may_write_one_file_at_once(tmp_path):
    contents = [bytes([number]) * 5000 for number in range(4)]

    def write(content: bytes) -> None:
        for _ in range(20):
            write_atomically(tmp_path / "a", [content])
            assert (tmp_path / "a").read_bytes() in contents, "whole"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, contents))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("module", "library"),
    [
        *((name, name) for name in ("accelerate", "lightning", "ray", "torchtitan", "transformers")),
        ("prometheus", "prometheus_client"),
    ],
)
def test_an_integration_without_its_library_names_the_extra(monkeypatch, module, library):
    class Absent:
        """A finder that has no such library."""

        @staticmethod
        def find_spec(name, *_):
            if name == library:
                raise ModuleNotFoundError(name=name)

    for name in [name for name in sys.modules if f"{name}.".startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"diloco.integrations.{module}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    sentence = rf"^{library} is not installed: run pip install 'diloco\[{module}\]'$"
    for kind in (UserError, ImportError):
        with pytest.raises(kind, match=sentence):
            importlib.import_module(f"diloco.integrations.{module}")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_may_have_no_fsync_of_directories(number, tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EINVAL:
        write_atomically(tmp_path / "file", [b"1"])
        assert (tmp_path / "file").read_bytes() == b"1"
    else:
        with pytest.raises(FileWriteError, match="file"):
            write_atomically(tmp_path / "file", [b"1"])
