"""The file `result.json` of a finished or failed run of a grid."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import FileError, UserError
from diloco.files import make_directory, write_atomically
from diloco.schema import Count, converted, read_json
from diloco.training.records.metrics import OuterStepMetrics
from diloco.training.records.summary import Summary

RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """The evaluation of one set of a run's parameters."""

    tasks: dict[str, dict[str, float | None]]
    run: str = ""
    parameters: str = ""
    step: Count = 0
    eval_loss: float | None = None
    eval_standard_error: float | None = None
    eval_bits_per_byte: float | None = None
    eval_tokens: Count = 0


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The content of `result.json`: why a run failed, the columns of a row from a table, or a run's results."""

    failed: str | None = None
    columns: dict[str, int | float | str | None] | None = None
    summary: Summary | None = None
    evaluated: dict[str, _Scores] = field(default_factory=dict)
    outer_steps: tuple[OuterStepMetrics, ...] = ()
    questions: dict[str, str] = field(default_factory=dict)
    is_final: bool | None = None

    def __post_init__(self) -> None:
        """Refuse a result of nothing, or of two kinds."""
        if [self.failed, self.columns, self.summary].count(None) != 2:
            raise UserError("it must hold failed, columns or summary, and one of them alone")


def read_results(directory: Path) -> dict[str, Any]:
    """The values of a run's `result.json`; none if there is no file.

    Raises:
        UserError: if it is damaged.
    """
    path = directory / RESULT_FILE
    if not path.exists():
        return {}
    try:
        result = read_json(path, dict[str, Any])
        converted(result, _Result, source=str(path))
    except FileError as error:
        raise UserError(f"{error}: delete it, so that the run is made again") from None
    return result


def write_results(directory: Path, result: Mapping[str, Any]) -> None:
    """Write the values to a run's `result.json`."""
    make_directory(directory)
    write_atomically(directory / RESULT_FILE, [json.dumps(result, indent=1).encode()])
