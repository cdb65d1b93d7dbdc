import shutil
from pathlib import Path

import pytest
from tests.training.runs import BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT, run


@pytest.fixture(scope="session")
def folder(tmp_path_factory, small_corpus) -> Path:
    """A directory of runs, with their text."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(small_corpus, folder / "text.jsonl")
    return folder


@pytest.fixture(scope="session")
def streaming(folder) -> Path:
    """A run of two replicas that was left alone; tests change copies of it."""
    flags = ["--num-tokens", "61440", "--log-layer-cosine", "--evaluation.every-steps", "60"]
    flags += ["--data.cache", str(folder / "data"), *BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT]
    process = run(folder, "--name", "streaming", *flags)
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr, process.stderr
    return folder / "runs" / "streaming"


@pytest.fixture(scope="session")
def finished_run(streaming) -> Path:
    """The same run, where one of any kind will do."""
    return streaming
