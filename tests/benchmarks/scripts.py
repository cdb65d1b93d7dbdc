"""Run a benchmark, and read what it writes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(script: str, *arguments: object, cwd: Path | None = None) -> str:
    """The output of a benchmark that ends well."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
