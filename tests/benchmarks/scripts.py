"""Run a benchmark, and read what it writes."""

import csv
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forks import fork_pythons
from tests.processes import run_main, run_mains

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
START_ANEW = ("walks.py",)
"""Benchmarks that trace the start of an interpreter."""
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(script: str, *arguments: object, cwd: Path | None = None, imports: Sequence[str] = ()) -> str:
    """The output of a benchmark that ends well, in a process that has imported modules."""
    process = end_of(script, *arguments, cwd=cwd, imports=imports)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def run_all(commands: Sequence[tuple[str, Sequence[str]]], *, imports: Sequence[str]) -> list[str]:
    """The outputs of benchmarks that end well, all of them forks of one process that has imported modules."""
    calls = [(_run_script, str(BENCHMARKS / script), [*words]) for script, words in commands]
    return [done.stdout for done in run_mains(calls, folder=Path.cwd(), timeout_seconds=200, imports=imports)]


def end_of(
    script: str, *arguments: object, cwd: Path | None = None, imports: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """The exit status and the output of a benchmark."""
    path, words = str(BENCHMARKS / script), [*map(str, arguments)]
    return run_main(_run_script, path, words, folder=cwd or Path.cwd(), timeout_seconds=200, imports=imports)


def _run_script(path: str, words: list[str]) -> None:
    sys.argv = [path, *words]
    sys.path[0] = str(BENCHMARKS)
    if Path(path).name not in START_ANEW:
        fork_pythons()
    runpy.run_path(path, run_name="__main__")


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
