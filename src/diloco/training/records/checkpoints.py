"""The files of a checkpoint, none of which can run code: tensors as safetensors, plain values as JSON, checksums.

    step-00000100/facts.json             plain values
    step-00000100/shard-0.safetensors    the tensors, or parts of tensors, of one process; one file a process
    step-00000100.sha256                 the checksums of all of them, as `sha256sum -c` reads them, written last

Of a tensor that is sharded each process writes its part, so that each element is written once, on any mesh; the
metadata of each file says where the parts lie.
"""

import json
import math
import re
import shutil
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.engine.parameters import copied_to_cpu, is_sharded, local, own_place, part_of
from diloco.errors import CheckpointError, CheckpointWriteError, FileError
from diloco.exchange.transport import Group
from diloco.files import make_directory, sha256, sync, write_atomically, writing
from diloco.schema import Count, converted, decoded, flat, read_json, without_format

FACTS_FILE = "facts.json"
FORMAT = 1
"""Version of the checkpoint's files, which `facts.json` names."""
_CUTS = "cuts"
"""The key of a safetensors file's metadata under which its cuts stand, as JSON."""


@dataclass(frozen=True)
class Cut:
    """The place of a part in a tensor."""

    start: list[Count]
    """The index at which the part begins, in each dimension."""
    shape: list[Count]
    """The shape of the whole tensor."""


def shard_file(shard: int) -> str:
    """The name of the file of one process's tensors."""
    return f"shard-{shard}.safetensors"


def step_path(directory: Path, step: int) -> Path:
    """The directory of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def finished(directory: Path) -> list[int]:
    """The steps whose checkpoints are finished, oldest first."""
    matches = (re.fullmatch(r"step-([0-9]{8,18})\.sha256", path.name) for path in directory.glob("step-*.sha256"))
    return sorted(int(match[1]) for match in matches if match)


def checksum_path(path: Path) -> Path:
    """The file with the checksums of a checkpoint."""
    return path.with_name(path.name + ".sha256")


def remove(path: Path) -> None:
    """Remove a checkpoint, its checksums first."""
    checksum_path(path).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def write_shard(path: Path, shard: int, num_shards: int, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's parts of the tensors, and its share of those that every process holds whole.

    Args:
        path: directory of the checkpoint.
        shard: this process among those of its replica.
        num_shards: their number.
        tensors: on the CPU, by dotted name; the same names in the same order in each process.

    Raises:
        FileWriteError: with the file's name.
    """
    cuts: dict[str, Cut] = {}
    mine: dict[str, Tensor] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        is_cut, part = is_sharded(tensor) and tensor.device_mesh.size() > 1, part_of(local(tensor), tensor)
        if (part.numel() > 0 or shard == 0) if is_cut else index % num_shards == shard:
            mine[name] = part.contiguous()
            if is_cut:
                start = [each.start for each in own_place(tensor, part=True)]
                cuts[name] = Cut(start, list(tensor.shape))
    metadata = {_CUTS: json.dumps({name: asdict(cut) for name, cut in cuts.items()})}
    file = path / shard_file(shard)
    with writing(file, sum(tensor.nbytes for tensor in mine.values())):
        safetensors.torch.save_file(mine, file, metadata)
        sync(file)


def read_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Read tensors of a checkpoint in place, as they were saved or on another mesh.

    Args:
        path: directory of the checkpoint, whose checksums were checked.
        tensors: nested by name; sharded as they shall be from now on.

    Raises:
        CheckpointError: if the files do not hold these tensors, whole, and of these shapes and types.
    """
    files = [path / name for name in read_checksums(path) if name != FACTS_FILE]
    read_files(files, tensors, source=f"checkpoint {path}")


def read_files(files: Sequence[Path], tensors: Mapping[str, Any], *, source: str) -> None:
    """Read tensors of safetensors files in place, as `read_tensors`; `source` names the files in errors."""
    with ExitStack() as stack:
        saved = _saved(files, stack, source)
        for name, tensor in flat(tensors).items():
            if name not in saved:
                raise CheckpointError(f"{source} lacks {name}: it is of another model, or of another run")
            _check_like(name, tensor, saved[name], source)
            _read_tensor(local(tensor), own_place(tensor, part=False), saved[name])


_Part = tuple[Any, Cut | None]
"""A slice of a safetensors file, and its place in the tensor; None where it is the whole."""


def _saved(files: Sequence[Path], stack: ExitStack, source: str) -> dict[str, list[_Part]]:
    """The parts of each tensor in some files."""
    parts: dict[str, list[_Part]] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            cuts = decoded((opened.metadata() or {}).get(_CUTS, "{}"), dict[str, Cut], source=str(file))
            for name in opened.keys():  # noqa: SIM118
                parts.setdefault(name, []).append((opened.get_slice(name), cuts.get(name)))
        except (SafetensorError, OSError, FileError) as error:
            raise CheckpointError(f"{file} can't be read: {error}") from error
    for name, of_one in parts.items():
        if not _are_one_tensor(of_one):
            raise CheckpointError(f"{source} is damaged: its parts of {name} do not make up one tensor")
    return parts


def _are_one_tensor(parts: list[_Part]) -> bool:
    """True if the parts fill the tensor without an overlap, and have one type."""
    sizes, cuts = [part.get_shape() for part, _ in parts], [cut for _, cut in parts if cut is not None]
    if not cuts:
        return len(parts) == 1
    shape = cuts[0].shape
    if len(cuts) < len(parts) or any(cut.shape != shape or len(cut.start) != len(shape) for cut in cuts):
        return False
    if len({part.get_dtype() for part, _ in parts}) > 1 or any(len(size) != len(shape) for size in sizes):
        return False
    places = [
        [(start, start + length) for start, length in zip(cut.start, size, strict=True)]
        for cut, size in zip(cuts, sizes, strict=True)
        if math.prod(size)
    ]
    is_inside = all(end <= most for place in places for (_, end), most in zip(place, shape, strict=True))
    overlap = any(_common(one, other) for one, other in combinations(places, 2))
    return is_inside and not overlap and sum(map(math.prod, sizes)) == math.prod(shape)


_Ends = Sequence[tuple[int, int]]
"""The first index of a place in each dimension, and the one after its last."""


def _common(one: _Ends, other: _Ends) -> _Ends:
    """The place that two have in common; of no dimension if there is none."""
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return both if all(start < end for start, end in both) else []


def _check_like(name: str, tensor: Tensor, parts: list[_Part], source: str) -> None:
    """Refuse a tensor of another shape or type than the one to be read into."""
    part, cut = parts[0]
    shape = tuple(part.get_shape() if cut is None else cut.shape)
    if shape != tuple(tensor.shape) or _DTYPES.get(part.get_dtype()) != tensor.dtype:
        raise CheckpointError(
            f"{source} has {name} as {part.get_dtype()} of shape {shape}, and the run needs "
            f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}: it is of another model"
        )


_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
"""Types of tensors by the names that safetensors has for them."""


def _read_tensor(shard: Tensor, place: tuple[slice, ...], parts: list[_Part]) -> None:
    """Copy what the parts have of a shard, which lies at a place in its tensor, or of a whole tensor."""
    if not shard.ndim:
        shard.copy_(parts[0][0][...])
        return
    for part, cut in parts:
        starts = cut.start if cut is not None else [0] * shard.ndim
        saved = [(start, start + size) for start, size in zip(starts, part.get_shape(), strict=True)]
        if both := _common(saved, [(each.start, each.stop) for each in place]):
            to = tuple(slice(a - each.start, b - each.start) for (a, b), each in zip(both, place, strict=True))
            source = tuple(slice(a - start, b - start) for (a, b), start in zip(both, starts, strict=True))
            shard[to].copy_(part[source])


def write_checksums(path: Path, checksums: Mapping[str, str]) -> None:
    """Write the checksums of a checkpoint's files, by name; from now on it is finished.

    Raises:
        FileWriteError: with the file's name.
    """
    lines = [f"{checksum}  {path.name}/{name}\n" for name, checksum in checksums.items()]
    write_atomically(checksum_path(path), [line.encode() for line in lines])


def read_checksums(path: Path) -> dict[str, str]:
    """The checksums of a checkpoint's files, by name: those that a checkpoint has, and no others.

    Raises:
        CheckpointError: if they can't be read, or list other files.
    """
    file = checksum_path(path)
    try:
        with file.open("rb") as opened:
            lines = opened.read(_MOST_BYTES).decode("ascii").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checksums of checkpoint {path} can't be read: {error}") from error
    listed = [line.split(f"  {path.name}/", 1) for line in lines]
    names = [name[-1] for name in listed]
    wanted = [FACTS_FILE, *(shard_file(shard) for shard in range(len(names) - 1))]
    if len(names) < 2 or names != wanted or not all(re.fullmatch("[0-9a-f]{64}", name[0]) for name in listed):
        raise CheckpointError(
            f"{file} does not list the files of a checkpoint, {FACTS_FILE} and {shard_file(0)} and so on: "
            "restore it, or delete it to resume from another checkpoint"
        )
    return {name: checksum for checksum, name in listed}


_MOST_BYTES = 1 << 24


def digest(file: Path) -> bytes:
    """The SHA-256 of a file; zeros if it can't be read, or is no file of its own."""
    try:
        # A link leads elsewhere, and a pipe never ends.
        is_file = stat.S_ISREG(file.lstat().st_mode)
        return bytes.fromhex(sha256(file)) if is_file else bytes(32)
    except OSError:
        return bytes(32)


_Facts = TypeVar("_Facts")


class Checkpoints:
    """The checkpoints of one replica, on a disk that all its processes see.

    Args:
        directory: of the run's checkpoints; the replica's own directory in it is made when it is first needed.
        replica: the replica's number.
        group: the replica's processes on their hosts, used for nothing else.
        keep: number of the newest checkpoints to keep.
    """

    def __init__(self, directory: Path, replica: int, group: Group, *, keep: int) -> None:
        self._directory, self._group, self._keep = _directory(directory, replica), group, keep
        self._shard, self._num_shards = group.index, group.size
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the checkpoint that is being written come to its end, even where the run failed."""
        if self._writer is not None:
            self._writer.join()

    def save(
        self, step: int, facts: Mapping[str, Any], tensors: Mapping[str, Any], *, drops_old: bool = True
    ) -> None:
        """Copy the tensors now, and write them in the background; every process of the replica must call it.

        Args:
            step: of the run.
            facts: JSON values; those of shard 0 are kept.
            tensors: nested by name; DTensors where the replica is sharded.
            drops_old: keep only the newest checkpoints then, as many as are to be kept.

        Raises:
            CheckpointWriteError: if the checkpoint before could not be written.
        """
        self.wait()
        staged = (step, dict(facts), _copied(tensors), drops_old)
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
        return _read_facts(path, kind)

    def load(self, step: int, tensors: dict[str, Any]) -> None:
        """Read the tensors of a step in place, without the other processes.

        Args:
            step: a step whose `facts` were read before.
            tensors: with the names and shapes of those that were saved, sharded as they shall be from now on.

        Raises:
            CheckpointError: if the checkpoint does not hold these tensors.
        """
        read_tensors(step_path(self._directory, step), tensors)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints after a step from which the run goes on, and unfinished ones."""
        if self._shard == 0:
            kept = {step_path(self._directory, s) for s in self.steps() if s <= step}
            for path in set(self._directory.glob("step-*/")) - kept:
                remove(path)

    def _write(self, step: int, facts: dict[str, Any], tensors: dict[str, Any], drops_old: bool) -> None:
        """Write a checkpoint with the other processes, check it, and drop old ones."""
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
                for old in self.steps()[: -self._keep] if drops_old else ():
                    remove(step_path(self._directory, old))
        except Exception as error:  # raised again where training waits
            self._failure = error
            if self._shard == 0:
                remove(path)

    def _write_mine(self, path: Path, facts: dict[str, Any], tensors: dict[str, Any]) -> bytes:
        """Write this process's file, and the facts where it is the first; return the file's digest."""
        make_directory(path)
        if self._shard == 0:
            write_atomically(path / FACTS_FILE, [json.dumps({"format": FORMAT, **facts}).encode()])
        write_shard(path, self._shard, self._num_shards, flat(tensors))
        return digest(path / shard_file(self._shard))

    def _by_shards(self, function: Callable[[Any], bytes], items: Sequence[Any]) -> list[bytes]:
        """The values of a function of each item, 32 bytes each; the processes of the replica share the work.

        A failure in one process is a failure in all.
        """
        mine, failure = torch.zeros(len(items) + 1, 32, dtype=torch.uint8, device="cpu"), None
        try:
            for index in range(self._shard, len(items), self._num_shards):
                mine[index] = torch.frombuffer(bytearray(function(items[index])), dtype=torch.uint8)
        except Exception as error:
            mine[-1, 0], failure = 1, error
        mine = self._group.reduce(mine, largest=True)
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


def _read_facts(path: Path, kind: type[_Facts]) -> _Facts:
    """The facts of a checkpoint whose checksums were checked."""
    file = path / FACTS_FILE
    try:
        values = without_format(read_json(file, dict[str, Any]), FORMAT, source=str(file))
        return converted(values, kind, source=str(file))
    except FileError as error:
        raise CheckpointError(f"checkpoint {error}") from error


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
    _read_facts(path, dict[str, Any])
    read_tensors(path, tensors)


def _directory(directory: Path, replica: int) -> Path:
    return directory / f"replica-{replica}"
