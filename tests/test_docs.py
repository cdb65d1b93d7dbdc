"""The pages build: their links, their anchors, and the commands that they name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_the_site_builds(tmp_path: Path):
    # Not --quiet: it hides the warnings from --strict, too, and nothing fails.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    path = f"{ROOT / 'src'}:{os.environ['PYTHONPATH']}"
    environment = os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    commands = (tmp_path / "site" / "reference" / "cli.html").read_text()
    assert "diloco experiment" in commands and "--held-out" in commands, "generated from the code"


def test_a_command_that_does_not_exist_is_named():
    from docs.generate import check_command

    assert check_command("diloco train tiny --num-replicas 2") is None
    assert check_command("diloco trane tiny") == "there is no verb 'trane'"
    assert check_command("diloco train tiny --replicas 2") == "there is no --replicas"
    assert check_command("diloco simulate curves") == "diloco simulate has no 'curves'"
