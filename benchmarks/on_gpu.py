"""The proof on a GPU, in pieces that write their results as they go and go on where they stopped.

    make gpu                                                  # all of it, into gpu-results/
    PYTHONPATH=src python benchmarks/on_gpu.py --output DIR [--pieces bits wire …] [--seconds 540]
    PYTHONPATH=src python benchmarks/on_gpu.py --output DIR --dry     # on the CPU, in seconds: all of it runs

Needs one NVIDIA GPU or more, diloco's own dependencies and a PyTorch with CUDA, and for some pieces transformers,
pytest, hypothesis and beartype; no network. `--data` is the folder with books/, for the training runs.

Each piece runs in a process of its own for 8 minutes at the most, and writes DIR/PIECE.jsonl, a line a
measurement. What is in it is not measured again; what was cut off is tried a second time, then left out. The exit
status is 0 when all is measured, 1 if something failed or missed its goal, 3 if `--seconds` are over and there is
more: call it again. DIR/report.md shows everything.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu.place import OutOfTimeError, Place, rows_of

PIECES = ("bits", "waits", "wire", "loss", "sync", "exchange", "throughput", "jobs", "suite", "training")
"""The pieces, in the order of what tells most in least time."""
PIECE_SECONDS = 480.0
_MOST_TRIES = 2
UNFINISHED = 3


def main() -> int:
    arguments = _arguments()
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        return _worker(arguments.worker, arguments, output)
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: --dry runs everything on the CPU, at a small size")
    end = time.monotonic() + arguments.seconds
    is_over = False
    for piece in arguments.pieces:
        while not is_over and (left := end - time.monotonic()) > 0:
            if _run(piece, arguments, output, min(left, PIECE_SECONDS)) != UNFINISHED:
                break
        is_over = is_over or end < time.monotonic()
    _report(output, arguments.pieces)
    if is_over:
        print("there is more: call it again")
        return UNFINISHED
    return int(any(row.get("ok") is False or "error" in row for row in _rows(output, arguments.pieces)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pieces", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--seconds", type=float, default=86_400.0, help="after which nothing new is begun")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--apart", action="store_true", help="dry, too, import all anew for each piece")
    parser.add_argument("--worker", choices=PIECES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(piece: str, arguments: argparse.Namespace, output: Path, seconds: float) -> int:
    """A piece in a process of its own; its exit status, or that it is not finished."""
    print(f"{piece}:", flush=True)
    if arguments.dry and not arguments.apart:
        return _forked(piece, argparse.Namespace(**vars(arguments) | {"seconds": seconds}), output)
    flags = ["--output", str(output), "--worker", piece, "--seconds", str(seconds), "--data", str(arguments.data)]
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    paths = [here, str(Path(here).parent / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, os.path.join(here, "on_gpu.py"), *flags, *(["--dry"] if arguments.dry else [])]  # noqa: PTH118
    try:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.run(command, env=environment, timeout=seconds + 30, check=False).returncode
    except subprocess.TimeoutExpired:
        return UNFINISHED


def _forked(piece: str, arguments: argparse.Namespace, output: Path) -> int:
    """The same, in a process that has made the imports: it is forked, which CUDA would not survive."""
    process = get_context("fork").Process(target=lambda: sys.exit(_worker(piece, arguments, output)))
    process.start()
    process.join(arguments.seconds + 30)
    if process.exitcode is None:
        process.kill()
        process.join()
        return UNFINISHED
    return process.exitcode


def _worker(piece: str, arguments: argparse.Namespace, output: Path) -> int:
    """Measure what is left of a piece."""
    folder, deadline = output / piece, time.monotonic() + arguments.seconds
    folder.mkdir(exist_ok=True)
    place = Place(arguments.dry, arguments.data.resolve(), folder, deadline)
    path = output / f"{piece}.jsonl"
    done = {row["key"] for row in _rows(output, [piece])}
    for key, measure in rows_of(import_module(f"gpu.{piece}").measurements(place), done):
        tries = _tries(output / f"{piece}.tries", key)
        if tries > _MOST_TRIES and piece != "training":
            _append(path, {"key": key, "error": f"it was cut off {_MOST_TRIES} times"})
            continue
        if time.monotonic() > deadline:
            return UNFINISHED
        start = time.monotonic()
        try:
            row = measure()
        except OutOfTimeError as error:
            print(f"  {key}: {error}", flush=True)
            return UNFINISHED
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        row = {"key": key, **row, "seconds": round(time.monotonic() - start, 1)}
        _append(path, row)
        print(f"  {json.dumps(row)}", flush=True)
    return 0


def _tries(path: Path, key: str) -> int:
    """The number of times that a measurement was begun, this time included"""
    with path.open("a") as file:
        file.write(json.dumps(key) + "\n")
    return path.read_text().splitlines().count(json.dumps(key))


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _rows(output: Path, pieces: list[str] | tuple[str, ...]) -> list[dict[str, Any]]:
    """The measurements so far."""
    paths = [output / f"{piece}.jsonl" for piece in pieces]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def _report(output: Path, pieces: list[str]) -> None:
    """All measurements as tables, for docs/results/gpu.md."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, dry"
    lines = ["# GPUs", "", f"PyTorch {torch.__version__} on {device}.", ""]
    for piece in pieces:
        lines += [f"## {piece}", "", "| measurement | goal | values |", "|---|---|---|"]
        for row in _rows(output, [piece]):
            ok = {True: "met", False: "missed", None: ""}[row.get("ok")]
            values = {name: value for name, value in row.items() if name not in ("key", "ok")}
            lines.append(f"| {row['key']} | {ok} | {json.dumps(values, ensure_ascii=False)} |")
        lines.append("")
    (output / "report.md").write_text("\n".join(lines))
    print(f"{output / 'report.md'}")


if __name__ == "__main__":
    raise SystemExit(main())
