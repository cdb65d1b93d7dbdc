"""`diloco train` as a process: stopped at any moment, and started where it can't be."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.training.runs import command


def interrupted(folder: Path, name: str, after: str) -> tuple[int, str, float]:
    """Ctrl-C in a terminal at a moment of a run: exit code, errors, seconds until the end."""
    log, metrics = folder / "errors", folder / "runs" / name / "metrics-0.jsonl"
    profile = "1" if after == "import" else ""  # a line for each module, where errors go
    with log.open("w") as file:
        process = subprocess.Popen(
            command("--name", name, "--num-tokens", "10M"),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPROFILEIMPORTTIME": profile},
        )
    with process:
        while after == "import" and " torch._C\n" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        if after != "import":
            assert process.stdout is not None and any("run   " in line for line in process.stdout)
        while after == "step" and not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None
            time.sleep(0.02)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        errors = re.sub("import time:.*\n", "", log.read_text())
        return process.returncode, errors, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ("import", "diloco: interrupted\n"),
        ("start", "diloco: "),
        ("step", "diloco: stopped by SIGINT; go on with: diloco train tiny --resume runs/step\n"),
    ],
)
def test_ctrl_c_ends_a_run_soon_and_with_one_line(tmp_path, small_corpus, after, sentence):
    shutil.copy(small_corpus, tmp_path / "text.jsonl")
    code, errors, seconds = interrupted(tmp_path, after, after)
    assert errors.startswith(sentence) and errors.count("\n") == 1, errors
    # CPython takes an interrupt inside of exec() for an unhandled one, and ends by the signal itself.
    assert code in (130, -signal.SIGINT) and seconds < 20
