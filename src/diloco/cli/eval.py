"""`diloco eval`: the held-out loss and zero-shot accuracy of a run."""

import json as writer
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.cli._command import Run, call
from diloco.errors import UserError
from diloco.training.config.config import Parameters

HELP = "held-out loss and zero-shot accuracy of a run: diloco eval RUN [--tasks …] [--data FILES]"
ORDER = 4


def run(arguments: list[str]) -> None:
    """Evaluate the run that a command line names."""
    call(_evaluate, arguments, prog="diloco eval")


def _evaluate(
    run: Run,
    parameters: Parameters = "outer",
    at_step: int | None = None,
    tasks: str = "",
    data: tuple[Path, ...] = (),
    limit: int | None = None,
    prepared: Path | None = None,
    json: bool = False,
) -> None:
    """Held-out loss and zero-shot accuracy of a run.

    Args:
        run: Directory of the run, or the URL of the store in which its replicas meet.
        parameters: outer: the parameters that the replicas share; replica: replica 0's own; average: the mean of
            all replicas' own. The last two need the run's checkpoints, and its directory.
        at_step: The step of the checkpoint to read them from; left out, the end of the run, or its newest
            checkpoint.
        tasks: Names of tasks, separated by commas; lm-evaluation-harness loads them from the hub unless --data has
            a file for them. Left out, the tasks of --data.
        data: Files of questions, a JSON object a line with query, choices, gold; a file's name begins with its
            task's name.
        limit: Largest number of questions a task; left out, all.
        prepared: Directory of the run's data, if it was moved, or the run is in a store.
        json: Print JSON.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} must be at least 1; left out, all questions are asked", "limit")
    files = _files(tasks, data)
    if limit is not None and not files:
        raise UserError(
            f"limit={limit} means nothing without tasks or data: set one of them, or leave it out",
            *("limit", "tasks", "data"),
        )
    from diloco.training.records.finished import evaluate_run

    options = {"tasks": files, "limit": limit, "prepared": prepared}
    result = evaluate_run(run, parameters=parameters, at_step=at_step, **options)
    if json:
        print(writer.dumps(result))
    else:
        _print_result(result)


def _files(tasks: str, data: tuple[Path, ...]) -> dict[str, Path | None]:
    """The file of questions of each task; None where lm-evaluation-harness has the task."""
    names = [name for name in tasks.split(",") if name] or [path.stem for path in data]
    fitting = {path: [name for name in names if f"{path.stem}_".startswith(f"{name}_")] for path in data}
    files: dict[str, Path | None] = {}
    for name in names:
        # Of arc and arc_easy, arc_easy_1.jsonl is the latter's alone.
        paths = [path for path in data if name == max(fitting[path], key=len, default="")]
        if len(paths) > 1:
            raise UserError(
                f"data: {paths[0]} and {paths[1]} belong to the task {name!r}: name one of them", "data"
            )
        files[name] = paths[0] if paths else None
    for path in data:
        if path not in files.values():
            task = next((name for name, file in files.items() if file is None), names[0])
            raise UserError(
                f"data={path} must be named after its task in tasks={tasks}, such as {task}_{path.name}: rename "
                "the file, or name its task",
                *("data", "tasks"),
            )
    return files


def _print_result(result: Mapping[str, Any]) -> None:
    print(f"{result['run']}, {result['parameters']} parameters after step {result['step']}")
    error = f" ± {result['eval_standard_error']:.4f}" if result["eval_standard_error"] is not None else ""
    print(f"held-out loss   {result['eval_loss']:.4f}{error} nats per token, {result['eval_tokens']:,} tokens")
    print(f"bits per byte   {result['eval_bits_per_byte']:.4f}")
    for name, scores in result["tasks"].items():
        for metric, value in scores.items():
            measure, comma, chosen = metric.partition(",")  # the harness's filter, where it has a name
            if isinstance(value, int | float) and not measure.endswith("_stderr"):
                stderr = scores.get(f"{measure}_stderr{comma}{chosen}")
                spread = f" ± {stderr:.4f}" if isinstance(stderr, float) and math.isfinite(stderr) else ""
                print(f"{name:15} {metric:8} {value:.4f}{spread}")
