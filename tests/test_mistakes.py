"""The page of mistakes says what is said to them today."""

import runpy
import sys
from pathlib import Path

import pytest
from tests.processes import run_main

DOCS = Path(__file__).parents[1] / "docs"


def make_mistakes(page: str) -> None:
    sys.argv = ["mistakes.py", page]
    sys.path[0] = str(DOCS)
    runpy.run_path(str(DOCS / "mistakes.py"), run_name="__main__")


@pytest.mark.slow
def test_each_mistake_is_answered_as_the_page_says(tmp_path):
    process = run_main(make_mistakes, str(tmp_path / "page.md"), folder=tmp_path, timeout_seconds=150)
    assert process.returncode == 0, process.stderr
    answers, expected = (path.read_text() for path in (tmp_path / "page.md", DOCS / "reference" / "mistakes.md"))
    changed = set(answers.splitlines()) ^ set(expected.splitlines())
    assert answers == expected, "python docs/mistakes.py writes the page anew:\n" + "\n".join(sorted(changed))
