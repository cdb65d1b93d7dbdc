"""Multiple-choice questions in files of the project's own: one JSON object per line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from diloco.errors import FileError, UserError
from diloco.schema import read_bytes

_MOST_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class Question:
    """One line of a file; other fields than these are ignored."""

    query: str
    choices: Annotated[list[str], msgspec.Meta(min_length=2)]
    gold: Annotated[int, msgspec.Meta(ge=0)]
    """Index of the right choice."""

    def __post_init__(self) -> None:
        if not all(map(str.strip, self.choices)):
            raise UserError(f"choices must not be blank, and one of the {len(self.choices)} is")
        if self.gold >= len(self.choices):
            raise UserError(f"gold is {self.gold}, but there are {len(self.choices)} choices")


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The questions of a file, each with `query`, `choices`, and `gold`, the index of the right choice.

    Raises:
        FileError: with the line, if the file can't be read, or a field is missing or wrong.
    """
    questions = []
    # A newline alone ends a line: texts may hold other separators.
    for number, line in enumerate(read_bytes(path, most_bytes=_MOST_BYTES).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            questions.append(vars(msgspec.json.decode(line, type=Question)))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise FileError(f"{path}, line {number}, can't be read as a question: {error}") from error
    if not questions:
        raise FileError(f"{path} holds no question")
    return questions
