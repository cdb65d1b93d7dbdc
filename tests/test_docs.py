"""The pages build: their links, their anchors, and the commands that they name; and none is too long."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diloco.fleets.fleet_file import read_launch

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path):
    # Not --quiet: it hides the warnings from --strict, too, and nothing fails.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    path = f"{ROOT / 'src'}:{os.environ['PYTHONPATH']}"
    environment = os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    commands = (tmp_path / "site" / "reference" / "cli.html").read_text()
    assert "diloco experiment" in commands and "--held-out" in commands, "generated from the code"


@pytest.mark.slow
def test_a_command_that_does_not_exist_is_named():
    from docs.generate import check_command

    assert check_command("diloco train tiny --num-replicas 2") is None
    assert check_command("diloco trane tiny") == "there is no verb 'trane'"
    assert check_command("diloco train tiny --replicas 2") == "there is no --replicas"
    assert check_command("diloco simulate curves") == "diloco simulate has no 'curves'"


def test_examples_in_toml_are_toml_and_the_fleet_is_one(tmp_path: Path):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    examples = {
        page.stem: re.findall("^```toml.*?\n(.*?)^```", page.read_text(), re.DOTALL | re.M) for page in pages
    }
    assert sum(map(len, examples.values())) >= 5
    for texts in examples.values():
        for text in texts:
            tomllib.loads(text)
    (fleet,) = examples["launch-a-fleet"]
    (tmp_path / "fleet.toml").write_text(fleet)
    assert read_launch(tmp_path / "fleet.toml").names == ("4090-0", "4090-1", "a100-0")


def test_the_pages_are_few_and_short():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    own = [re.sub(r'^```\w+ title="[^"]+"\n.*?^```$', "", page, flags=re.DOTALL | re.MULTILINE) for page in pages]
    assert len(pages) <= 40 and sum(len(page.split()) for page in own) <= 35_000, "copied code apart"
