import pytest

from diloco.errors import UserError
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
        ('{"query": "a", "choices": ["b", "c"]}', "line 2: the field 'gold' is missing"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 2: 'gold' is 2, but there are 2 choices"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "line 2: 'choices' must be two texts or more"),
        ('{"query": "a", "choices": ["b", " "], "gold": 0}', "or more, none of them blank"),
        ('{"query": 1, "choices": ["b", "c"], "gold": 0}', "line 2: 'query' must be a str, not 1"),
        (r'{"query": "\ud800", "choices": ["b", "c"], "gold": 0}', "line 2: a text can't be encoded in UTF-8"),
        ("[]", "line 2: the field 'query' is missing"),
        ("not JSON", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        (" " * 2**20 + "{}", "line 2: longer than 1,048,576 bytes"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "line 2: 'gold' must be a int, not True"),
        ("\xff", "can't be read as questions"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_the_line(line, sentence, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(LINE.encode() + line.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=sentence):
        read_questions(path)


def test_none_and_more_questions_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.evaluation.questions._MOST_LINES", 3)
    for text, sentence in (("\n", "holds no question"), (LINE * 4, r"many\.jsonl has more than 3 lines")):
        (tmp_path / "many.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=sentence):
            read_questions(tmp_path / "many.jsonl")
