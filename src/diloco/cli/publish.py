"""`diloco publish`: other people's checkpoints as versions that anybody may follow."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import tyro

from diloco.cli._command import call
from diloco.errors import UserError

HELP = "checkpoints as versions in a store that others follow: diloco publish CHECKPOINT … URL"
ORDER = 13


def run(arguments: list[str]) -> None:
    """Publish what a command line names."""
    call(_publish, arguments, prog="diloco publish")


def _publish(
    checkpoints: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="CHECKPOINT … URL")],
    dtype: Literal["own", "bfloat16", "float16", "float32"] = "own",
    whole_every: int = 50,
    keep: int = 2,
    key: Path | None = None,
) -> None:
    """Publish each checkpoint as the next version: whole, or the cells that differ from the version before.

    Its step is the number at the end of its name, such as checkpoint-500, or else one more than that before it.

    Args:
        checkpoints: Directories in the format of transformers or peft, or files of safetensors, oldest first; and
            last the place: a directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        dtype: Type to which floating-point tensors are cast; own casts none.
        whole_every: Versions after which a whole one follows.
        keep: The newest whole versions that are kept, with those that follow them; older ones are deleted.
        key: File of the key that signs; left out, that of DILOCO_KEY, or none.
    """
    if len(checkpoints) < 2:
        raise UserError("name a checkpoint and then the URL: diloco publish CHECKPOINT … URL")
    import torch

    from diloco.publishing.directories import read_checkpoint
    from diloco.publishing.publisher import Publisher

    *paths, url = checkpoints
    if any(Path(url).glob("*.safetensors")):
        raise UserError(f"{url} is a checkpoint: name the URL last: diloco publish CHECKPOINT … URL")
    options = {"whole_every": whole_every, "keep": keep, "key": None if key is None else str(key)}
    steps = _steps(paths)
    with Publisher(url, dtype=None if dtype == "own" else getattr(torch, dtype), **options) as publisher:
        for path, step in zip(paths, steps, strict=True):
            state, files = read_checkpoint(Path(path))
            version = publisher.publish(state, step=step, files=files)
            body = version.smallest
            print(
                f"{path}: version {version.number}, step {step}, {version.digest:.16}; {body.num_bytes:,} bytes, "
                f"{'whole' if body is version.whole else 'as the difference'}",
                flush=True,
            )


def _steps(paths: Sequence[str]) -> list[int]:
    """The steps of checkpoints, by their names.

    Raises:
        UserError: if a later one is of an earlier step, which followers would then have.
    """
    steps = [-1]
    for path in paths:
        number = re.search(r"(\d{1,15})$", Path(path).name.removesuffix(".safetensors"))
        steps.append(int(number[1]) if number else steps[-1] + 1)
    for (before, last), (path, step) in pairwise(zip(paths, steps[1:], strict=True)):
        if step < last:
            raise UserError(
                f"{path}, of step {step}, stands after {before}, of step {last}: name the oldest first, since "
                "followers take the last: ls -v lists them so"
            )
    return steps[1:]
