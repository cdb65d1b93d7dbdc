import shutil
from pathlib import Path

import pytest
from tests.training.runs import BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT, trained


@pytest.fixture(scope="session")
def folder(tmp_path_factory, small_corpus) -> Path:
    """Where runs are made, beside their text."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(small_corpus, folder / "text.jsonl")
    return folder


@pytest.fixture(scope="session")
def streaming(folder) -> Path:
    """A run that was left alone."""
    flags = ("--num-tokens", "61440", "--log-layer-cosine", "--evaluation.every-steps", "60")
    return trained(folder, "streaming", *flags, *BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT)
