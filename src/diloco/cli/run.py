"""`diloco eval`, `diloco export` and `diloco report`: what runs left."""

import math
from pathlib import Path

import tyro

from diloco.errors import UserError
from diloco.training.export import Format, export_run
from diloco.training.finished import Parameters, evaluate_run


def evaluate(
    run: tyro.conf.Positional[Path],
    parameters: Parameters = "outer",
    tasks: str = "",
    data: tuple[Path, ...] = (),
    limit: int | None = None,
    prepared: Path | None = None,
    json: bool = False,
) -> None:
    """Held-out loss and zero-shot accuracy of a run.

    Args:
        run: Its directory.
        parameters: outer: those that the replicas share; replica: replica 0's own; average: the mean of all
            replicas' own. The last two need the run's checkpoints.
        tasks: Names of tasks, separated by commas; lm-evaluation-harness loads them from the hub unless --data has
            a file for them. Left out, those of --data.
        data: Files of questions, a JSON object a line with query, choices, gold; a file belongs to the task that
            its name begins with.
        limit: Questions of a task at the most.
        prepared: The run's data, where it is no longer where it was.
        json: Print JSON.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}; left out, all questions are asked")
    found = evaluate_run(run, parameters=parameters, tasks=_files(tasks, data), limit=limit, prepared=prepared)
    if json:
        import json as writer

        print(writer.dumps(found))
        return
    print(f"{found['run']}, {parameters} parameters after step {found['step']}")
    error = f" ± {found['eval_standard_error']:.4f}" if found["eval_standard_error"] is not None else ""
    print(f"held-out loss   {found['eval_loss']:.4f}{error} nats a token, {found['eval_tokens']:,} tokens")
    print(f"bits per byte   {found['eval_bits_per_byte']:.4f}")
    for name, scores in found["tasks"].items():
        for metric, value in scores.items():
            if isinstance(value, int | float) and not metric.endswith("_stderr"):
                stderr = scores.get(f"{metric}_stderr")
                spread = f" ± {stderr:.4f}" if isinstance(stderr, float) and math.isfinite(stderr) else ""
                print(f"{name:15} {metric:8} {value:.4f}{spread}")


def _files(tasks: str, data: tuple[Path, ...]) -> dict[str, Path | None]:
    names = [name for name in tasks.split(",") if name] or [path.stem for path in data]
    found: dict[str, Path | None] = {}
    for name in names:
        paths = [path for path in data if path.stem == name]
        paths = paths or [path for path in data if path.stem.startswith(f"{name}_")]
        if len(paths) > 1:
            raise UserError(f"{paths[0]} and {paths[1]} both belong to the task {name!r}: name one of them")
        found[name] = paths[0] if paths else None
    for path in data:
        if path not in found.values():
            raise UserError(
                f"the name of {path} begins with that of none of the tasks {', '.join(map(repr, found))}: "
                "name its task by --tasks, or rename the file"
            )
    return found


def export(run: tyro.conf.Positional[Path], to: Format, output: Path, prepared: Path | None = None) -> None:
    """Write a run's outer parameters, with config and tokenizer, for other programs.

    Args:
        run: Its directory.
        to: safetensors, with our own names; or hf, for transformers' AutoModelForCausalLM.from_pretrained.
        output: A new directory.
        prepared: The run's data, where it is no longer where it was.
    """
    export_run(run, to, output, prepared=prepared)
    print(output)


def report(sources: tyro.conf.Positional[tuple[Path, ...]], output: Path = Path("report.html")) -> None:
    """Write one self-contained HTML page about runs and experiments.

    Args:
        sources: Directories of runs, and the CSVs that `diloco experiment` writes.
        output: The page.
    """
    from diloco.report.html.experiment_section import experiment_section
    from diloco.report.html.page import write_page
    from diloco.report.html.run_section import run_section

    if not sources:
        raise UserError("name a run's directory, or an experiment's CSV")
    sections = [experiment_section(path) if path.suffix == ".csv" else run_section(path) for path in sources]
    write_page("diloco: " + ", ".join(path.stem for path in sources[:4]), sections, output)
    print(output)
