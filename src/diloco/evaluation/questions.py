"""Multiple-choice questions in files of the project's own: a JSON object a line."""

import json
from pathlib import Path
from typing import Any

from diloco.errors import UserError

_FIELDS = {"query": str, "choices": list, "gold": int}


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The questions of a file, each with `query`, `choices`, and `gold`, the index of the right choice.

    Raises:
        UserError: with the line, if the file can't be read or a field is missing or wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read as questions: {error}") from None
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"{path} holds no question")
    return questions


def _question(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        question = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON ({error})") from None
    for name, kind in _FIELDS.items():
        if not isinstance(question, dict) or name not in question:
            raise UserError(f"{path}, line {number}: the field {name!r} is missing")
        if not isinstance(question[name], kind):
            raise UserError(f"{path}, line {number}: {name!r} must be a {kind.__name__}, not {question[name]!r}")
    choices, gold = question["choices"], question["gold"]
    if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise UserError(f"{path}, line {number}: 'choices' must be two texts or more, none of them blank")
    if not 0 <= gold < len(choices):
        raise UserError(f"{path}, line {number}: 'gold' is {gold}, but there are {len(choices)} choices")
    for text in (question["query"], *choices):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{path}, line {number}: a text can't be encoded in UTF-8 ({error})") from None
    return {"query": question["query"], "choices": choices, "gold": gold}
