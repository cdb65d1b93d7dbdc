"""Multiple-choice questions in files of the project's own: a JSON object a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from diloco.errors import UserError

_LONGEST_LINE_BYTES = 2**20
_MOST_LINES = 10**6
_FIELDS = {"query": str, "choices": list, "gold": int}


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The questions of a file, each with `query`, `choices`, and `gold`, the index of the right choice.

    Raises:
        UserError: with the line, if the file can't be read, a field is missing or wrong, a line is longer than
            1 MiB, or there are more than a million of them.
    """
    try:
        with path.open("rb") as file:
            questions = [_question(path, number, line) for number, line in _lines(file, path) if line.strip()]
    except OSError as error:
        raise UserError(f"{path} can't be read as questions: {error.strerror}") from None
    if not questions:
        raise UserError(f"{path} holds no question")
    return questions


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_LONGEST_LINE_BYTES + 1):  # only \n ends it: a text may hold other separators
        number += 1
        if len(line) > _LONGEST_LINE_BYTES:
            raise UserError(f"{path}, line {number}: longer than {_LONGEST_LINE_BYTES:,} bytes")
        if number > _MOST_LINES:
            raise UserError(f"{path} has more than {_MOST_LINES:,} lines: take fewer questions")
        yield number, line


def _question(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        question = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: can't be read as questions: {error}") from None
    except RecursionError:
        raise UserError(f"{path}, line {number}: not JSON (its lists and objects are nested too deep)") from None
    except ValueError as error:
        raise UserError(f"{path}, line {number}: not JSON ({error})") from None
    for name, kind in _FIELDS.items():
        if not isinstance(question, dict) or name not in question:
            raise UserError(f"{path}, line {number}: the field {name!r} is missing")
        if type(question[name]) is not kind:
            shown = repr(question[name])[:50]
            raise UserError(f"{path}, line {number}: {name!r} must be a {kind.__name__}, not {shown}")
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
