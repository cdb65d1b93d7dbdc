"""Run a benchmark, and read what it writes."""

import csv
import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forks import fork_pythons
from tests.processes import run_main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
START_ANEW = ("walks.py", "many_replicas.py")
"""Benchmarks that trace the start of an interpreter, or fork processes of their own."""
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(script: str, *arguments: object, cwd: Path | None = None, imports: Sequence[str] = ()) -> str:
    """The output of a benchmark that ends well; modules that its processes need may be imported before."""
    process = end_of(script, *arguments, cwd=cwd, imports=imports)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def end_of(
    script: str, *arguments: object, cwd: Path | None = None, imports: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """The exit status and the output of a benchmark."""
    path, words = str(BENCHMARKS / script), [*map(str, arguments)]
    return run_main(_run_script, path, words, imports, folder=cwd or Path.cwd(), timeout_seconds=200)


def _run_script(path: str, words: list[str], imports: Sequence[str]) -> None:
    for module in imports:
        importlib.import_module(module)
    sys.argv = [path, *words]
    sys.path[0] = str(BENCHMARKS)
    if Path(path).name not in START_ANEW:
        fork_pythons()
    runpy.run_path(path, run_name="__main__")


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
