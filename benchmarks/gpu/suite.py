"""The tests that need a GPU, or run on one where there is one."""

import importlib.util
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from gpu.place import Measurements, OutOfTimeError, Place, Row

ROOT = Path(__file__).parents[2]
TESTS = {
    "beside nccl": ["tests/test_examples.py", "-k", "nccl"],
    "codecs and outer step": ["tests/wire", "tests/outer", "-m", "not slow"],
}


def measurements(place: Place) -> Measurements:
    tests = {"beside nccl": ["tests/scaling/test_table.py", "--noconftest"]} if place.dry else TESTS
    return {name: partial(_pytest, place, arguments) for name, arguments in tests.items()}


def _pytest(place: Place, arguments: list[str]) -> Row:
    """The last line of pytest."""
    missing = [name for name in ("pytest", "hypothesis", "beartype") if importlib.util.find_spec(name) is None]
    if missing:
        return {"error": f"not installed: {', '.join(missing)}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    seconds = max(1.0, place.deadline - time.monotonic())
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise OutOfTimeError("the tests were ended") from None
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    return {"ok": done.returncode == 0, "result": lines[-1]}
