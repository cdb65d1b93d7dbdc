"""One replica's checkpoints: written in the background, the newest kept, checksums checked on load.

`step-00000100/` is a checkpoint of torch.distributed.checkpoint, which can be read on any number of shards, with
`facts.json` beside its tensors. `step-00000100.sha256` has the checksums of its files as `sha256sum -c` reads
them; it is written last, so that a checkpoint without it was never finished.
"""

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diloco.engine.sharded import copied_to_cpu
from diloco.errors import CheckpointError, CheckpointWriteError
from diloco.files import sha256, write_atomically

_Item = TypeVar("_Item")


class Checkpoints:
    """The checkpoints of one replica, on a disk that all its processes see.

    Args:
        directory: of the run's checkpoints; the replica's own directory in it is made when it is first needed.
        replica: the replica's number.
        group: the replica's processes, on gloo, used for nothing else.
        keep: number of the newest checkpoints to keep.
    """

    def __init__(self, directory: Path, replica: int, group: dist.ProcessGroup, *, keep: int) -> None:
        self._directory, self._group, self._keep = _directory(directory, replica), group, keep
        self._shard, self._num_shards = dist.get_rank(group), dist.get_world_size(group)
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
                f"could not write a checkpoint to {self._directory}: {_reason(failure)}; "
                "make room, then resume: earlier checkpoints are intact"
            ) from failure

    def steps(self) -> list[int]:
        """The steps whose checkpoints are finished, oldest first."""
        return _finished(self._directory)

    def facts(self, step: int) -> dict[str, Any]:
        """The facts of a step, once its files are checked; every process of the replica must call it.

        Raises:
            CheckpointError: if a file is missing, cut short or altered.
        """
        checksums = _checksums(self._path(step))
        names = list(checksums)
        present = self._by_shards(lambda name: _sha256_if_any(self._directory / name), names)
        if damaged := [name for name, now in zip(names, present, strict=True) if now != checksums[name]]:
            earlier = [s for s in self.steps() if s < step]
            then = f"to resume from step {earlier[-1]}" if earlier else "and start again"
            raise CheckpointError(
                f"{_damaged(self._directory / damaged[0])}: delete {_checksum_path(self._path(step)).name} {then}"
            )
        return json.loads((self._path(step) / _FACTS).read_text())

    def load(self, step: int, tensors: dict[str, Any], *, optional: tuple[str, ...] = ()) -> None:
        """Read the tensors of a step in place; every process of the replica must call it.

        Args:
            step: a step whose `facts` were read before.
            tensors: with the names and shapes of those that were saved, sharded as they shall be from now on.
            optional: the names, from the outermost, of a group whose tensors need not have been saved.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        saved = FileSystemReader(self._path(step)).read_metadata().state_dict_metadata
        present = _without_unsaved(tensors, optional, saved) if optional else tensors
        load(present, checkpoint_id=self._path(step), process_group=self._group)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints after a step from which the run goes on, and unfinished ones."""
        if self._shard == 0:
            kept = {self._path(s) for s in self.steps() if s <= step}
            for path in set(self._directory.glob("step-*/")) - kept:
                _remove(path)

    def _write(self, step: int, facts: dict[str, Any], tensors: dict[str, Any]) -> None:
        # Here, in the background, since they take more than a second to import.
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self._path(step)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if self._shard == 0:
                write_atomically(path / _FACTS, [json.dumps(facts).encode()])
            metadata = save(tensors, checkpoint_id=path, process_group=self._group)
            _check_disk(path, metadata)
            lines = self._by_shards(
                lambda file: f"{sha256(file)}  {path.name}/{file.name}\n",
                sorted(file for file in path.iterdir() if file.is_file()),
            )
            if self._shard == 0:
                write_atomically(_checksum_path(path), [line.encode() for line in lines])
                for old in self.steps()[: -self._keep]:
                    _remove(self._path(old))
        except (Exception, CheckpointException) as error:  # raised again where training waits
            self._failure = error
            if self._shard == 0:
                _remove(path)

    def _by_shards(self, function: Callable[[_Item], str], items: Sequence[_Item]) -> list[str]:
        """The values of a function of each item; the processes of the replica share the work."""
        mine = [function(item) for item in items[self._shard :: self._num_shards]]
        text = json.dumps(mine).encode()
        length = torch.tensor(len(text))
        dist.all_reduce(length, dist.ReduceOp.MAX, group=self._group)
        texts = [torch.empty(int(length), dtype=torch.uint8) for _ in range(self._num_shards)]
        padded = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self._group)
        everyones: list[list[str]] = [json.loads(text.numpy().tobytes()) for text in texts]
        return [everyones[index % self._num_shards][index // self._num_shards] for index in range(len(items))]

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"


_FACTS = "facts.json"


def _check_disk(path: Path, metadata: Any) -> None:
    """Refuse files that another process wrote where this process can't see them."""
    files = {information.relative_path for information in metadata.storage_data.values()} if metadata else set()
    if missing := sorted(name for name in files if not (path / name).exists()):
        raise OSError(f"{missing[0]} is missing, which another process has written: a replica needs one disk")


def _without_unsaved(tensors: Any, group: Sequence[str], saved: Container[str], path: tuple[str, ...] = ()) -> Any:
    """The nested tensors without those in a group whose dotted names are not among those saved."""
    if not isinstance(tensors, Mapping):
        return tensors
    in_group = path == tuple(group)
    return {
        name: _without_unsaved(value, group, saved, (*path, name))
        for name, value in tensors.items()
        if not in_group or ".".join((*path, name)) in saved
    }


def _copied(tensors: Any) -> Any:
    """The tensors on the CPU, so that training may go on changing them."""
    if isinstance(tensors, Mapping):
        return {name: _copied(value) for name, value in tensors.items()}
    return copied_to_cpu(tensors)


def finished_steps(directory: Path, replica: int) -> list[int]:
    """The steps of a replica's finished checkpoints, oldest first."""
    return _finished(_directory(directory, replica))


def read(directory: Path, replica: int, step: int, tensors: dict[str, Any]) -> None:
    """Read some tensors of a finished checkpoint in place, whole, without the replica's processes.

    Raises:
        CheckpointError: if a file is missing, cut short or altered, or the checkpoint has no such tensors.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    path = _directory(directory, replica) / f"step-{step:08d}"
    for name, checksum in _checksums(path).items():
        if _sha256_if_any(path.parent / name) != checksum:
            raise CheckpointError(
                f"{_damaged(path.parent / name)}: to take an earlier one, if there is, delete "
                f"{_checksum_path(path)}"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is no process group, as intended
            load(tensors, checkpoint_id=path, no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path} can't be read: {_reason(error)}") from error


def _directory(directory: Path, replica: int) -> Path:
    return directory / f"replica-{replica}"


def _finished(directory: Path) -> list[int]:
    steps = (path.stem.removeprefix("step-") for path in directory.glob("step-*.sha256"))
    return sorted(int(step) for step in steps if step.isdigit())


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _checksums(path: Path) -> dict[str, str]:
    """SHA-256 by file name, relative to the directory of the checkpoints."""
    try:
        lines = [line.split("  ", 1) for line in _checksum_path(path).read_text().splitlines()]
        return {name: checksum for checksum, name in lines}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checksums of checkpoint {path} can't be read: {error}") from error


def _remove(path: Path) -> None:
    _checksum_path(path).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _sha256_if_any(path: Path) -> str:
    """The checksum of a file, or "" if it can't be read."""
    try:
        return sha256(path)
    except OSError:
        return ""


def _damaged(path: Path) -> str:
    return f"checkpoint {path} is damaged (its SHA-256 is not the one it was saved with)"


def _reason(error: BaseException) -> str:
    """The operating system's reason for an error, which torch hides behind its own words."""
    for failure, _ in getattr(error, "failures", {}).values():  # of CheckpointException, by process
        error = failure
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]
