"""The one flag with which the fuzzers go on for hours."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "limit"), [([], "timeout: 240"), (["--hostile-examples", "1"], "")])
def test_a_number_of_examples_lifts_the_limit_on_time(flags, limit):
    command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("test_facts.py")), "--collect-only"]
    options = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options, *flags], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout
    assert limit in done.stdout if limit else "timeout:" not in done.stdout, done.stdout
