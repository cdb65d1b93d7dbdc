"""One replica's checkpoints: written atomically in the background, the newest kept, a checksum checked on load.

`step-00000100.pt` holds the state, `step-00000100.pt.sha256` its checksum as `sha256sum -c` reads it; the latter
is written last, so that a checkpoint without it was never finished.
"""

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diloco.data.atomic import sync, write_atomically


class CheckpointError(ValueError):
    """A checkpoint can't be read."""


class CheckpointWriteError(OSError):
    """A checkpoint can't be written."""


class Checkpoints:
    """The checkpoints of one replica.

    Args:
        directory: of the run's checkpoints; the replica's own, within it, is made when it is first needed.
        replica: whose they are.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, replica: int, *, keep: int) -> None:
        self._directory, self._keep = directory / f"replica-{replica}", keep
        self._writer: threading.Thread | None = None
        self._failure: OSError | RuntimeError | None = None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy a state of tensors, containers and plain values now, and write it in the background.

        Raises:
            CheckpointWriteError: if the one before could not be written.
        """
        self.wait()
        self._writer = threading.Thread(target=self._write, args=(step, _copied(state)), name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until what was saved is on disk.

        Raises:
            CheckpointWriteError: if it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointWriteError(
                f"could not write a checkpoint to {self._directory}: {_reason(failure)}; "
                "make room, then resume: what was saved before is intact"
            ) from failure

    def steps(self) -> list[int]:
        """The steps whose checkpoints are finished, oldest first."""
        finished = self._directory.glob("step-*.pt.sha256")
        return sorted(int(path.name.removeprefix("step-").removesuffix(".pt.sha256")) for path in finished)

    def load(self, step: int) -> dict[str, Any]:
        """The state of a step, on the CPU.

        Raises:
            CheckpointError: if the file is missing, cut short or altered.
        """
        path = self._path(step)
        try:
            expected = _checksum_path(path).read_text().split()[0]
            damaged = _sha256(path) != expected
        except (OSError, IndexError) as error:
            raise CheckpointError(f"checkpoint {path} can't be read: {error}") from error
        if damaged:
            earlier = [s for s in self.steps() if s < step]
            otherwise = f"to resume from step {earlier[-1]}" if earlier else "and start again"
            raise CheckpointError(
                f"checkpoint {path} is damaged (its SHA-256 is not the one it was saved with): "
                f"delete it and {_checksum_path(path).name} {otherwise}"
            )
        return torch.load(path, map_location="cpu", weights_only=True)

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        path = self._path(step)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            _checksum_path(path).unlink(missing_ok=True)
            unfinished = path.with_suffix(".tmp")
            try:
                torch.save(state, unfinished)
                checksum = _sha256(unfinished)
                sync(unfinished)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
            write_atomically(_checksum_path(path), [f"{checksum}  {path.name}\n".encode()])
            for old in self.steps()[: -self._keep]:
                self._remove(old)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            self._failure = error

    def drop_after(self, step: int) -> None:
        """Remove what lies beyond a step that the run goes on from."""
        for later in [s for s in self.steps() if s > step]:
            self._remove(later)

    def _remove(self, step: int) -> None:
        _checksum_path(self._path(step)).unlink()
        self._path(step).unlink()

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}.pt"


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _copied(value: Any) -> Any:
    """The value with every tensor copied to the CPU, so that training may go on changing it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    """What the system said: torch hides it behind its own words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]
