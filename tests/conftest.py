import json
import os

# Before anything starts threads: a core for each test process, and each replica that it starts.
os.environ["OMP_NUM_THREADS"] = "1"

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# The shapes and types that the mathematics is annotated with are checked at every call.
CHECKED = [
    "diloco.outer.mixing",
    "diloco.outer.nesterov",
    "diloco.wire.blocks",
    "diloco.wire.floats",
    "diloco.wire.integers",
    "diloco.wire.sparse",
    "diloco.models.decoder",
    "diloco.models.language_model",
]
install_import_hook(CHECKED, "beartype.beartype")

# The same examples in every run, however slow the computer is.
settings.register_profile("diloco", deadline=None, derandomize=True)
settings.load_profile("diloco")


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory) -> Path:
    """A file of sentences that a tiny model can learn something of."""
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    subjects, verbs, objects = (
        ("the cat", "a ship", "my aunt"),
        ("sees", "carries", "forgets"),
        ("rain", "salt", "him"),
    )
    sentences = [f"{s} {v} {o}, {i}." for i in range(40) for s in subjects for v in verbs for o in objects]
    rows = [{"id": str(i), "text": " ".join(sentences[i : i + 30])} for i in range(0, len(sentences), 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, small_corpus) -> Path:
    """A run of two replicas that is over."""
    folder = tmp_path_factory.mktemp("finished")
    command = [sys.executable, "-m", "diloco", "train", "tiny", "--name", "finished", "--runs", str(folder)]
    command += ["--data.train", str(small_corpus), "--data.held-out-fraction", "0.1"]
    command += ["--data.cache", str(folder / "data"), "--evaluation.every-steps", "20", "--seed", "3"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    return folder / "finished"
