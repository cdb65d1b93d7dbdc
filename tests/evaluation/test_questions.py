import pytest

from diloco.errors import FileError
from diloco.evaluation.questions import read_questions

LINE = '{"query": "a\u2028", "choices": ["b", "c"], "gold": 0}\n'


def test_a_question_a_line(tmp_path):
    (tmp_path / "questions.jsonl").write_text(LINE + "\n" + LINE, encoding="utf-8")
    assert (
        read_questions(tmp_path / "questions.jsonl")
        == [{"query": "a\u2028", "choices": ["b", "c"], "gold": 0}] * 2
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"query": "a", "choices": ["b", "c"]}', "line 2, can't be .*: Object missing required field `gold`"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 2, .* gold is 2, but there are 2 choices"),
        ('{"query": "a", "choices": ["b", "c"], "gold": -1}', "Expected `int` >= 0 - at `..gold`"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "Expected `array` of length >= 2 - at `..choices`"),
        ('{"query": "a", "choices": ["b", " "], "gold": 0}', "choices must not be blank, and one of the 2 is"),
        ('{"query": 1, "choices": ["b", "c"], "gold": 0}', "Expected `str`, got `int` - at `..query`"),
        (
            r'{"query": "\ud800", "choices": ["b", "c"], "gold": 0}',
            "unexpected end of escaped utf-16",
        ),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "Expected `int`, got `bool` - at `..gold`"),
        ("[]", "Expected `object`, got `array`"),
        ("not JSON", "line 2, can't be read as a question"),
        ('{"query": ' + "[" * 100_000, "line 2, can't be read as a question"),
        ('{"a": ' + "[" * 100_000, "line 2, can't be read as a question"),
        ("\xff", "line 2, can't be read as a question"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_the_line(line, sentence, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(LINE.encode() + line.encode("latin-1") + b"\n")
    with pytest.raises(FileError, match=sentence):
        read_questions(path)


def test_no_file_and_a_file_without_questions_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, sentence in (("empty.jsonl", "holds no question"), ("absent.jsonl", "can't be read: No such file")):
        with pytest.raises(FileError, match=sentence):
            read_questions(tmp_path / name)
