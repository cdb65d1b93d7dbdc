"""Command lines that can't work end with the sentences of `tests/mistakes.jsonl`; the page shows some of them."""

import html
import re
from pathlib import Path

import pytest
from tests.mistakes import make_all, read_list, write_list
from tests.processes import run_main

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "mistakes.md"


@pytest.mark.slow
def test_each_mistake_ends_with_the_sentence_of_the_list(tmp_path):
    process = run_main(make_all, tmp_path / "made.jsonl", folder=tmp_path, timeout_seconds=220)
    assert process.returncode == 0, process.stderr
    write_list(read_list(), tmp_path / "expected.jsonl")
    made, expected = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("made", "expected"))
    changed = "\n".join(sorted(set(made) ^ set(expected)))
    assert made == expected, f"python -m tests.mistakes writes the list anew:\n{changed}"


def test_the_page_shows_mistakes_of_the_list():
    cells = re.findall(
        r"^\| `(.*?)`(?:<br>[^|]*)? \| (?:`(.*?)`|<code>(.*?)</code>) \|$", PAGE.read_text(), re.MULTILINE
    )
    rows = [(typed, plain or html.unescape(escaped)) for typed, plain, escaped in cells]
    assert len(rows) == 20
    known = {(mistake.typed, mistake.sentence) for mistake in read_list()}
    assert not [row for row in rows if row not in known]
