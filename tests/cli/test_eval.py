from pathlib import Path

import pytest
from tests.cli.commands import refusal

from diloco.cli.eval import _files
from diloco.errors import UserError


def test_a_task_has_the_file_that_its_name_begins():
    arc, easy, piqa = map(Path, ("arc.jsonl", "arc_easy.jsonl", "piqa_1.jsonl"))
    assert _files("", (arc, piqa)) == {"arc": arc, "piqa_1": piqa}
    assert _files("piqa,arc,hellaswag", (arc, easy, piqa)[::2]) == {"piqa": piqa, "arc": arc, "hellaswag": None}


def test_a_limit_of_no_questions_is_refused(capsys):
    sentence = "--limit=5 means nothing without --tasks or --data: set one of them, or leave it out"
    assert refusal(capsys, "eval", "nowhere", "--limit", "5") == sentence


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (("piqa_1.jsonl", "piqa_2.jsonl"), "belong to the task 'piqa'"),
        (
            ("arc.jsonl",),
            "^data=arc.jsonl must be named after its task in tasks=piqa, such as piqa_arc.jsonl: rename",
        ),
    ],
)
def test_a_file_belongs_to_one_task(data, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        _files("piqa", tuple(map(Path, data)))
    assert "data" in error.value.fields
