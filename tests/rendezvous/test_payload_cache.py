"""The cache of payloads: memory first, then files, then nothing; what it gives back has the same bytes."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from diloco.rendezvous.payloads import DISK_OVER_MEMORY, PayloadCache

SIZE = 4096


def payload(number: int) -> Tensor:
    return torch.full((SIZE,), number, dtype=torch.uint8)


def open_files(folder: Path) -> int:
    """Mapped files of a folder, which have no name any more."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(" (deleted)") and f" {folder}/" in line for line in maps)


def test_the_least_recently_used_go_to_files_and_then_leave(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = PayloadCache(2 * SIZE)
    cache.keep("a", payload(1))
    cache.keep("b", payload(2))
    assert cache.get("a") is not None and open_files(tmp_path) == 0
    cache.keep("c", payload(3))
    assert open_files(tmp_path) == 1, "b was used before a"
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        assert torch.equal(cache.get(name), payload(number))
    for number in range(4, 4 + 2 * DISK_OVER_MEMORY):
        cache.keep(str(number), payload(number))
    assert open_files(tmp_path) == 2 * DISK_OVER_MEMORY
    gone = [name for name in "abc" if cache.get(name) is None]
    assert len(gone) == 1, "memory holds two, files 32, and 35 were kept"
    cache.drop("4")
    assert cache.get("4") is None and open_files(tmp_path) == 2 * DISK_OVER_MEMORY - 1


def test_a_payload_larger_than_all_of_it_is_given_up() -> None:
    cache = PayloadCache(100)
    cache.keep("a", payload(1))
    assert cache.get("a") is None


def test_without_space_a_payload_is_given_up(monkeypatch, caplog) -> None:
    def full(**_) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    cache = PayloadCache(SIZE)
    cache.keep("a", payload(1))
    cache.keep("b", payload(2))
    assert cache.get("a") is None and torch.equal(cache.get("b"), payload(2))
    assert "will be downloaded again: [Errno 28] No space left on device" in caplog.text
