"""The text that benchmarks train on here."""

from pathlib import Path

import pytest


@pytest.fixture
def text(small_corpus: Path, tmp_path: Path) -> list[str]:
    """The flags of both texts."""
    lines = small_corpus.read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:-8]), ("held_out", lines[-8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    return ["--train", str(tmp_path / "train.jsonl"), "--held-out", str(tmp_path / "held_out.jsonl")]
