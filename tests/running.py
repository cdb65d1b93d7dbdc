"""Examples and snippets of the docs, run in the processes of `run_replicas`."""

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed.run as launcher
from tests.forks import fork_pythons

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SNIPPETS = ROOT / "docs" / "snippets"


def run_example(folder: str, port: int, num_processes: int, name: str, *arguments: str) -> str:
    """The output of an example in one of the processes that a torchrun would start, several times side by side."""
    os.chdir(folder)
    job, rank = divmod(int(os.environ.pop("DILOCO_REPLICA")), num_processes)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port + job),
        "TORCHELASTIC_RUN_ID": str(port + job),
    }
    sys.argv = [name, *(argument.format(job=job) for argument in arguments)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return output.getvalue()


def run_snippets(snippets: Sequence[str], ports: Sequence[int], folder: str) -> list[str]:
    """The hash of Θ after each snippet, in one of its replicas."""
    os.chdir(folder)
    hashes = []
    for snippet, port in zip(snippets, ports, strict=True):
        os.environ["DILOCO_ADDRESS"] = f"127.0.0.1:{port}"
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            hashes.append(runpy.run_path(str(SNIPPETS / snippet))["outer_hash"])
    return hashes


def torchrun(words: Sequence[str]) -> None:
    """Be a launcher, whose processes are forks of this one."""
    fork_pythons()
    launcher.main(words)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]


def replicas_agree(output: str, *, num_processes: int) -> bool:
    hashes = re.findall("outer hash ([0-9a-f]{16})", output)
    return len(hashes) == num_processes and len(set(hashes)) == 1
