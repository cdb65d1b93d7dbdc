"""The time that people wait for: commands, the first step of a run, and the import of the engine.

    python benchmarks/start.py                         # five times each, in about two minutes
    python benchmarks/start.py --other ../before/src   # in turns with the tree in another directory

Wall seconds and processor seconds of all processes of a command, user and system, the median of the repeats. The
text is prepared and bytecode is written before. Linux only: this process adopts those that a command leaves.
"""

import argparse
import ctypes
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ENGINE = """
import time, torch
start, begin = time.perf_counter(), time.process_time()
import diloco; diloco.StreamingDiLoCo
print(time.perf_counter() - start, time.process_time() - begin)
"""
ROWS = ("diloco --help", "diloco train --help", "diloco train tiny", "its first step", "the engine, after torch")


def seconds(tree: Path, words: list[str], folder: Path) -> tuple[float, float, float, str]:
    """Wall and processor seconds of a command, wall seconds to a run's first step, and the output."""
    metrics, first = folder / "runs" / "run" / "metrics-0.jsonl", math.nan
    before, begin = _processor_seconds(), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if math.isnan(first) and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - begin
            time.sleep(0.005)
        wall = time.perf_counter() - begin
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {text}")
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return wall, _processor_seconds() - before, first, text


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(tree: Path, folder: Path, number: int, flags: list[str]) -> list[tuple[float, float]]:
    """Wall and processor seconds of each row; a first step has no processor seconds of its own."""
    if (folder / "runs" / "run").exists():
        (folder / "runs" / "run").rename(folder / "runs" / f"before-{number}-{time.monotonic_ns()}")
    helps = [seconds(tree, ["-m", "diloco", *words], folder)[:2] for words in (["--help"], ["train", "--help"])]
    wall, processor, first, _ = seconds(tree, ["-m", "diloco", "train", "tiny", "--name", "run", *flags], folder)
    engine = seconds(tree, ["-c", ENGINE], folder)[3].split()
    return [*helps, (wall, processor), (first, math.nan), (float(engine[0]), float(engine[1]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the src/ of another tree, measured in turns with this one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the run")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    spec = find_spec("diloco")
    assert spec is not None and spec.origin is not None, "diloco is installed"
    trees = {"this": Path(spec.origin).parent.parent} | (
        {"other": options.other.absolute()} if options.other else {}
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, tree in trees.items():  # prepares the text, and writes bytecode
            seconds(tree, ["-m", "diloco", "train", "tiny", "--name", label, *options.flags], folder)
        times = {label: list[list[tuple[float, float]]]() for label in trees}
        for number in range(options.repeats):
            for label, tree in trees.items():
                times[label].append(measured(tree, folder, number, options.flags))
    heads = [f"{label} wall, CPU" for label in trees]
    print(f"{f'median of {options.repeats}':<26}{''.join(f'{head:>20}' for head in heads)}")
    for index, row in enumerate(ROWS):
        cells = []
        for label in trees:
            wall, processor = (statistics.median(t[index][column] for t in times[label]) for column in (0, 1))
            cells.append(f"{wall:.2f}" + (f", {processor:.2f}" if not math.isnan(processor) else ""))
        print(f"{row:<26}{''.join(f'{cell:>20}' for cell in cells)}")


if __name__ == "__main__":
    main()
