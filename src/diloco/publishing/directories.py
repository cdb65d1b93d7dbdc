"""Checkpoints on disk in the format of transformers: read to be published, and written as they are followed."""

import fcntl
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from diloco.errors import FileError, UserError
from diloco.files import expanded, make_directory, reading, sync, write_json, write_tensors, writing
from diloco.publishing.follower import Follower
from diloco.publishing.versions import MOST_FILE_BYTES, Version
from diloco.schema import Count, read_bytes, read_json

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
"""Files of weights: of a model, the index of one in several files, and of adapters."""
_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files beside the weights: config, tokenizer, chat template."""
_NO_FILES = ("model.safetensors.index.json", "trainer_state.json")
_CURRENT = "current"
_NUMBER = "version.json"


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """The tensors of a checkpoint by name, and the small files beside them.

    Args:
        path: a directory of transformers or peft, or a file of safetensors.

    Raises:
        UserError: if there are no weights.
        FileError: if a file can't be read.
    """
    path = expanded(path)
    if path.is_file():
        return _tensors(path), {}
    weights = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        raise UserError(
            f"{path} is no checkpoint: give a file of safetensors, such as a run's outer.safetensors, or a "
            f"directory with {_WEIGHTS[0]}"
        )
    tensors = dict[str, Tensor]()
    parts = [weights] if weights.suffix == ".safetensors" else _parts(weights)
    for part in parts:
        tensors |= _tensors(part)
    names = sorted({file for pattern in _FILES for file in path.glob(pattern) if file.name not in _NO_FILES})
    return tensors, {file.name: read_bytes(file, most_bytes=MOST_FILE_BYTES) for file in names}


def _tensors(file: Path) -> dict[str, Tensor]:
    with reading(file):
        return load_file(file)


@dataclass(frozen=True)
class _Number:
    """The content of a file that says which version its directory holds."""

    number: Count
    step: Count
    digest: str


def _parts(index: Path) -> list[Path]:
    content = read_json(index, dict[str, dict])
    names = set(map(str, content.get("weight_map", {}).values()))
    if not names or not all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise FileError(f"{index} can't be read: its weight_map names no files of safetensors beside it")
    return [index.with_name(name) for name in sorted(names)]


class FollowedDirectory:
    """A directory whose link `current` leads to the newest version that was written, as transformers reads it.

    Args:
        path: is made if it is not there.

    Raises:
        UserError: if something else has the name of the link or of a version, or another object writes there.
        FileWriteError: if it can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = expanded(path)
        self.current = self.path / _CURRENT
        if self.current.exists() and not self.current.is_symlink():
            raise UserError(f"{self.current} is no link: give a directory of its own", "to")
        make_directory(self.path)
        for version in self._versions():
            _check_own(version)
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another follower writes into {self.path}: give this one a directory of its own", "to"
            ) from None
        except OSError:  # a file system without locks
            pass

    def resume(self, follower: Follower) -> Version | None:
        """Have a follower hold the version that is here; None if there is none, or it is not the place's."""
        try:
            written = read_json(self.current / _NUMBER, _Number)
            state, _ = read_checkpoint(self.current.resolve())
        except UserError:
            return None
        # What is read is mapped into memory, and can't be changed there.
        return follower.resume(written.number, {name: tensor.clone() for name, tensor in state.items()})

    def write(self, version: Version, state: Mapping[str, Tensor], files: Mapping[str, bytes]) -> None:
        """Write a version into a directory of its own, have the link lead there, and remove old versions.

        Raises:
            FileWriteError: if it can't be written; the link leads to the version before.
        """
        directory = self.path / f"version-{version.number}"
        partial = self.path / f".{directory.name}.partial"
        weights = _WEIGHTS[2 if "adapter_config.json" in files and "config.json" not in files else 0]
        with writing(directory, version.num_bytes):
            for path in self.path.glob(".version-*.partial"):  # of a write that was interrupted, or had no room
                shutil.rmtree(path, ignore_errors=True)
            before = self.current.resolve().name
            partial.mkdir()
            for name, content in files.items():
                (partial / name).write_bytes(content)
            write_tensors(partial / weights, state, {"format": "pt"})
            write_json(
                partial / _NUMBER, {"number": version.number, "step": version.step, "digest": version.digest}
            )
            for path in (*partial.iterdir(), partial):
                sync(path)
            if directory.exists():  # of a publisher that began anew
                self._remove(directory)
            partial.rename(directory)
            link = self.path / f".{_CURRENT}.{secrets.token_hex(4)}"
            link.symlink_to(directory.name)
            link.replace(self.current)
            sync(self.path)
        # The version before stays: who has opened it can read it to its end.
        for path in self._versions():
            if path.name not in (before, directory.name):
                self._remove(path)

    def _versions(self) -> list[Path]:
        return [path for path in self.path.iterdir() if re.fullmatch(r"version-\d{1,12}", path.name)]

    def _remove(self, directory: Path) -> None:
        """Remove a version, under another name, so that a kill leaves none without its number."""
        _check_own(directory)
        partial = self.path / f".{directory.name}.{secrets.token_hex(4)}.partial"
        with writing(directory):
            directory.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def _check_own(directory: Path) -> None:
    """Refuse a directory with a version's name that `FollowedDirectory` did not write."""
    if not (directory / _NUMBER).is_file():
        raise UserError(
            f"{directory} has no {_NUMBER} and would be removed: give the versions a directory of their own", "to"
        )
