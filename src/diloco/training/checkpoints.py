"""One replica's checkpoints: written in the background, the newest kept, checksums checked on load."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diloco.engine.sharded import copied_to_cpu
from diloco.errors import CheckpointError, CheckpointWriteError, FileError
from diloco.files import make_directory, write_atomically
from diloco.schema import read_json
from diloco.training.checkpoint_files import (
    FACTS_FILE,
    checksum_path,
    digest,
    finished,
    flat,
    read_checksums,
    read_tensors,
    remove,
    shard_file,
    step_path,
    write_checksums,
    write_shard,
)

_Facts = TypeVar("_Facts")


class Checkpoints:
    """The checkpoints of one replica, on a disk that all its processes see.

    Args:
        directory: of the run's checkpoints; the replica's own directory in it is made when it is first needed.
        replica: the replica's number.
        group: the replica's processes, on gloo, used for nothing else; None if it is one without a group.
        keep: number of the newest checkpoints to keep.
    """

    def __init__(self, directory: Path, replica: int, group: dist.ProcessGroup | None, *, keep: int) -> None:
        self._directory, self._group, self._keep = _directory(directory, replica), group, keep
        self._shard, self._num_shards = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the checkpoint that is being written come to its end, even where the run failed."""
        if self._writer is not None:
            self._writer.join()

    def save(self, step: int, facts: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Copy the tensors now, and write them in the background; every process of the replica must call it.

        Args:
            step: of the run.
            facts: JSON values; those of shard 0 are kept.
            tensors: nested by name; DTensors where the replica is sharded.

        Raises:
            CheckpointWriteError: if the checkpoint before could not be written.
        """
        self.wait()
        staged = (step, dict(facts), _copied(tensors))
        self._writer = threading.Thread(target=self._write, args=staged, name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            CheckpointWriteError: if it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointWriteError(
                f"could not write a checkpoint to {self._directory}: {failure}; "
                "make room, then resume: earlier checkpoints are intact"
            ) from failure

    def steps(self) -> list[int]:
        """The steps whose checkpoints are finished, oldest first."""
        return finished(self._directory)

    def facts(self, step: int, kind: type[_Facts] = dict[str, Any]) -> _Facts:
        """The facts of a step, once its files are checked; every process of the replica must call it.

        Args:
            step: of the checkpoint.
            kind: of the facts, as `read_json` reads it.

        Raises:
            CheckpointError: if a file is missing, cut short or altered, or the facts are not of this kind.
        """
        path = step_path(self._directory, step)
        checksums = read_checksums(path)
        digests = self._by_shards(digest, [path / name for name in checksums])
        earlier = [s for s in self.steps() if s < step]
        then = f"to resume from step {earlier[-1]}" if earlier else "and start again"
        _check(path, checksums, digests, f"delete {checksum_path(path).name} {then}")
        try:
            return read_json(path / FACTS_FILE, kind)
        except FileError as error:
            raise CheckpointError(f"checkpoint {error}") from error

    def load(self, step: int, tensors: dict[str, Any], *, optional: str | None = None) -> None:
        """Read the tensors of a step in place, without the other processes.

        Args:
            step: a step whose `facts` were read before.
            tensors: with the names and shapes of those that were saved, sharded as they shall be from now on.
            optional: a dotted prefix; the tensors whose names begin with it need not have been saved.

        Raises:
            CheckpointError: if the checkpoint does not hold these tensors.
        """
        read_tensors(step_path(self._directory, step), tensors, optional=optional)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints after a step from which the run goes on, and unfinished ones."""
        if self._shard == 0:
            kept = {step_path(self._directory, s) for s in self.steps() if s <= step}
            for path in set(self._directory.glob("step-*/")) - kept:
                remove(path)

    def _write(self, step: int, facts: dict[str, Any], tensors: dict[str, Any]) -> None:
        path = step_path(self._directory, step)
        names = [FACTS_FILE, *map(shard_file, range(self._num_shards))]
        try:
            digests = self._by_shards(
                lambda shard: self._write_mine(path, facts, tensors), range(self._num_shards)
            )
            if self._shard == 0:
                on_disk = [digest(path / FACTS_FILE), *digests]
                _check_disk(path, names)
                write_checksums(path, dict(zip(names, map(bytes.hex, on_disk), strict=True)))
                for old in self.steps()[: -self._keep]:
                    remove(step_path(self._directory, old))
        except Exception as error:  # raised again where training waits
            self._failure = error
            if self._shard == 0:
                remove(path)

    def _write_mine(self, path: Path, facts: dict[str, Any], tensors: dict[str, Any]) -> bytes:
        """Write this process's file, and the facts where it is the first; return the file's digest."""
        make_directory(path)
        if self._shard == 0:
            write_atomically(path / FACTS_FILE, [json.dumps(facts).encode()])
        write_shard(path, self._shard, self._num_shards, flat(tensors))
        return digest(path / shard_file(self._shard))

    def _by_shards(self, function: Callable[[Any], bytes], items: Sequence[Any]) -> list[bytes]:
        """The values of a function of each item, 32 bytes each; the processes of the replica share the work.

        A failure in one process is a failure in all.
        """
        mine, failure = torch.zeros(len(items) + 1, 32, dtype=torch.uint8), None
        try:
            for index in range(self._shard, len(items), self._num_shards):
                mine[index] = torch.frombuffer(bytearray(function(items[index])), dtype=torch.uint8)
        except Exception as error:
            mine[-1, 0], failure = 1, error
        if self._group is not None:
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        if failure is not None:
            raise failure
        if mine[-1, 0]:
            raise OSError("another process of this replica failed, and says why")
        return [bytes(row.tolist()) for row in mine[:-1]]


def _check_disk(path: Path, names: Sequence[str]) -> None:
    """Refuse files that another process wrote where this process can't see them."""
    if missing := [name for name in names if not (path / name).exists()]:
        raise OSError(f"{missing[0]} is missing, which another process has written: a replica needs one disk")


def _check(path: Path, checksums: Mapping[str, str], digests: Sequence[bytes], way_out: str) -> None:
    """Refuse a checkpoint that has a file which is not the one that was written."""
    for (name, checksum), now in zip(checksums.items(), digests, strict=True):
        if now.hex() != checksum:
            raise CheckpointError(
                f"checkpoint {path / name} is damaged (its SHA-256 is not the one it was saved with): {way_out}"
            )


def _copied(tensors: Any) -> Any:
    """The tensors on the CPU, so that training may go on changing them."""
    if isinstance(tensors, Mapping):
        return {name: _copied(value) for name, value in tensors.items()}
    return copied_to_cpu(tensors)


def finished_steps(directory: Path, replica: int) -> list[int]:
    """The steps of a replica's finished checkpoints, oldest first."""
    return finished(_directory(directory, replica))


def read(directory: Path, replica: int, step: int, tensors: dict[str, Any]) -> None:
    """Read some tensors of a finished checkpoint in place, whole, without the replica's processes.

    Raises:
        CheckpointError: if a file is missing, cut short or altered, or the checkpoint has no such tensors.
    """
    path = step_path(_directory(directory, replica), step)
    checksums = read_checksums(path)
    way_out = f"to take an earlier one, if there is, delete {checksum_path(path)}"
    _check(path, checksums, [digest(path / name) for name in checksums], way_out)
    read_tensors(path, tensors)


def _directory(directory: Path, replica: int) -> Path:
    return directory / f"replica-{replica}"
