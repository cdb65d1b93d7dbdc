import shutil
from pathlib import Path

import pytest


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
