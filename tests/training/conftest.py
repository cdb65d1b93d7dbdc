import shutil
from pathlib import Path

import pytest
from tests.training.runs import SAVING, SHORT, run


@pytest.fixture(scope="session")
def folder(tmp_path_factory, small_corpus) -> Path:
    """A directory of runs, with their text."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(small_corpus, folder / "text.jsonl")
    return folder


@pytest.fixture(scope="session")
def streaming(folder, finished_run) -> Path:
    """The finished run, in that directory."""
    return shutil.copytree(finished_run, folder / "runs" / finished_run.name)


@pytest.fixture(scope="session")
def short(once, small_corpus) -> Path:
    """A run of two replicas that nobody has stopped, to compare with those that somebody has."""

    def train(folder: Path) -> None:
        shutil.copy(small_corpus, folder / "text.jsonl")
        done = run(folder, "--name", "short", *SHORT, *SAVING)
        assert done.returncode == 0, done.stderr

    return once("short_run", train) / "runs" / "short"
