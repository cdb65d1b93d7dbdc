"""Checkpoints that were changed, with or without checksums that fit: refused by our own error, or sound."""

import json
import os
import random
import resource
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import settings
from tests.hostile.mutations import generator, hostile_pickle, mutated_bytes, mutated_json

from diloco.errors import CheckpointError
from diloco.files import sha256
from diloco.schema import flat
from diloco.training.records.checkpoints import (
    checksum_path,
    digest,
    finished,
    read,
    read_checksums,
    step_path,
    write_checksums,
    write_shard,
)

NUM_EXAMPLES = settings.get_profile("hostile").max_examples
FILES = ("facts.json", "shard-0.safetensors", "shard-1.safetensors")
TENSORS = {"model": {"weight": torch.arange(12.0).reshape(4, 3), "step": torch.tensor(3.0)}, "sent": torch.ones(5)}


@pytest.fixture
def path(tmp_path) -> Path:
    """The checkpoint of step 7 of replica 0, of two processes."""
    path = step_path(tmp_path / "replica-0", 7)
    path.mkdir(parents=True)
    (path / "facts.json").write_text('{"format": 1, "step": 7}')
    for shard in range(2):
        write_shard(path, shard, 2, flat(TENSORS))
    renew_checksums(path)
    return path


def renew_checksums(path: Path) -> None:
    write_checksums(path, {name: digest(path / name).hex() for name in FILES})


def load(path: Path) -> dict:
    tensors = {
        "model": {name: torch.zeros_like(t) for name, t in TENSORS["model"].items()},
        "sent": torch.zeros(5),
    }
    read(path.parents[1], 0, 7, tensors)
    return tensors


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_changed_is_refused(path, name):
    whole = (path / name).read_bytes()
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], whole + b"\0", b""):
        (path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
            load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [],
        lambda lines: lines[1:],
        lambda lines: lines[:1],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [*lines, lines[0]],
        lambda lines: [lines[0], lines[1], lines[1]],
        lambda lines: [*lines, f"{'0' * 64}  /etc/passwd"],
        lambda lines: [line.replace("step-00000007/", "step-00000007/../../") for line in lines],
        lambda lines: [line.replace("step-00000007/", "") for line in lines],
        lambda lines: [line[1:] for line in lines],
        lambda lines: [*lines, "x" * 1000],
    ],
)
def test_checksums_of_other_files_than_those_that_are_read_are_refused(path, change):
    lines = checksum_path(path).read_text().splitlines()
    checksum_path(path).write_text("".join(line + "\n" for line in change(lines)))
    with pytest.raises(CheckpointError, match="does not list the files of a checkpoint"):
        read_checksums(path)
    with pytest.raises(CheckpointError):
        load(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(path, tmp_path, kind):
    file = path / FILES[1]
    elsewhere = tmp_path / "elsewhere"
    shutil.move(file, elsewhere)
    if kind == "link":
        file.symlink_to(elsewhere)
        assert sha256(file) == read_checksums(path)[FILES[1]]
    elif kind == "directory":
        file.mkdir()
    else:
        os.mkfifo(file)
    with pytest.raises(CheckpointError, match="is damaged"):
        load(path)


def test_names_that_look_like_checksums_are_no_steps(path):
    for name in ("step-²²²²²²²².sha256", "step-00000008.sha256.sha256", "step--0000008.sha256", "step-.sha256"):
        (path.parent / name).touch()
    assert finished(path.parent) == [7]


@pytest.mark.parametrize("name", [".metadata", *FILES])
def test_no_pickle_is_loaded_wherever_it_lies(path, tmp_path, name):
    (path / name).write_bytes(hostile_pickle(tmp_path / "marker"))
    renew_checksums(path)
    try:
        load(path)
    except CheckpointError:
        assert name in FILES
    assert not (tmp_path / "marker").exists()


def check_mutation(path: Path) -> None:
    """Read a checkpoint whose checksums fit: the refusal is ours, or the result has its shapes."""
    renew_checksums(path)
    try:
        loaded = flat(load(path))
    except CheckpointError:
        return
    for name, tensor in flat(TENSORS).items():
        assert loaded[name].shape == tensor.shape and loaded[name].dtype == tensor.dtype


def test_mutations_with_checksums_that_fit_are_refused_or_sound(path):
    rng = generator()
    wholes = {name: (path / name).read_bytes() for name in FILES[1:]}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for example in range(4 * NUM_EXAMPLES):
        name = rng.choice(FILES[1:])
        mutated = mutated_bytes if example % 2 else with_header
        (path / name).write_bytes(mutated(wholes[name], rng))
        check_mutation(path)
        (path / name).write_bytes(wholes[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10, "more than 64 MiB"


def with_header(content: bytes, rng: random.Random) -> bytes:
    """The same file with another header: names, shapes, types, offsets, and where parts begin."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = rng.choice([name for name in header if name != "__metadata__"])
    num_dims = rng.randrange(3)
    start = [rng.choice((0, 0, 1, 2, 1 << 62)) for _ in range(num_dims)]
    shape = [rng.choice((3, 4, 5, 8, 1 << 62)) for _ in range(num_dims)]
    cuts = {name: {"start": start, "shape": shape}}
    header["__metadata__"]["cuts"] = json.dumps(cuts if rng.random() < 0.7 else mutated_json(cuts, rng))
    changed = json.dumps(mutated_json(header, rng) if rng.random() < 0.7 else header).encode()
    return struct.pack("<Q", len(changed)) + changed + content[8 + length :]


def cut_file(path: Path, shard: int, rows: torch.Tensor, cut: dict) -> None:
    safetensors.torch.save_file({"sent": rows}, path / FILES[1 + shard], {"cuts": json.dumps({"sent": cut})})


@pytest.mark.parametrize(
    ("starts", "sizes", "is_sound"),
    [
        ((0, 2), (5, 5), True),
        ((0, 1), (5, 5), False),  # overlap
        ((0, 3), (5, 5), False),  # gap
        ((1, 3), (6, 6), False),  # begins late
        ((0, 2), (6, 6), False),  # ends early
        ((0, 2), (5, 6), False),
        ((0, 0), (5, 5), False),
    ],
)
def test_parts_that_are_no_whole_tensor_are_refused(path, starts, sizes, is_sound):
    for shard, rows in enumerate((torch.arange(2.0), torch.arange(2.0, 5.0))):
        cut_file(path, shard, rows, {"start": [starts[shard]], "shape": [sizes[shard]]})
    renew_checksums(path)
    tensors = {"sent": torch.zeros(5)}
    if is_sound:
        read(path.parents[1], 0, 7, tensors)
        assert tensors["sent"].tolist() == [0, 1, 2, 3, 4]
    else:
        with pytest.raises(CheckpointError, match="do not make up one tensor"):
            read(path.parents[1], 0, 7, tensors)


def test_another_type_is_refused_by_name(path):
    tensors = {"sent": torch.zeros(5, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"has sent as F32 of shape \(5,\), and the run needs bfloat16"):
        read(path.parents[1], 0, 7, tensors)
