"""4.8M parameters at 20 tokens each: Data-Parallel, and Streaming with two replicas, in runs beside each other."""

import json
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

from gpu.place import Job, Measurements, OutOfTimeError, Place, Row, killed, started

_MOST_WORSE = 0.01  # goal: how far Streaming's best held-out loss may lie above Data-Parallel's best
_SECONDS_TO_END = 20.0
METHODS = {
    "data_parallel": ["--method", "data_parallel", "--num-replicas", "1"],
    "streaming_overlapped_fp4": ["--method", "streaming_overlapped_fp4", "--num-replicas", "2"],
}
RATES = ("0.00141", "0.00283")
_SIZES = {
    "--model.num-layers": 6,
    "--model.width": 256,
    "--model.num-heads": 4,
    "--model.vocab-size": 0,
    "--sequence-length": 1024,
    "--global-batch": 8,
    "--num-tokens": 11_680 * 8192,
    "--evaluation.num-tokens": 1 << 20,
    "--checkpoint.every-steps": 1000,
}
"""20 tokens a parameter, bytes, in as many steps as the papers' smaller runs have."""


def measurements(place: Place) -> Measurements:
    runs = [(method, rate) for rate in place.size(RATES, RATES[:1]) for method in METHODS]
    return {
        "trained": partial(_train, place, runs),
        **{_name(*run): partial(_summary, place, *run) for run in runs},
        "gap": partial(_gap, place),
    }


def _name(method: str, rate: str) -> str:
    return f"{method}_{rate}"


def _train(place: Place, runs: list[tuple[str, str]]) -> Row:
    """Train, or go on; runs that have no time left are ended, and go on from their checkpoints next time.

    With the same global batch and one process, Data-Parallel has the bits of gradients that replicas average.
    """
    jobs = {run: _started(place, *run) for run in runs if not (_directory(place, *run) / "summary.json").exists()}
    try:
        for job in jobs.values():
            job.wait(max(1.0, place.deadline - time.monotonic() - _SECONDS_TO_END))
    except subprocess.TimeoutExpired:
        steps = {_name(*run): _last_step(_directory(place, *run)) for run in runs}
        raise OutOfTimeError(f"the runs stand at {steps}") from None
    finally:
        for job in jobs.values():
            killed(job)
    logs = {_name(*run): place.folder / f"{_name(*run)}.log" for run, job in jobs.items() if job.returncode}
    return {"error": {name: log.read_text()[-500:] for name, log in logs.items()}} if logs else {"ok": True}


def _started(place: Place, method: str, rate: str) -> Job:
    words = ["-m", "diloco", "train", *_flags(place, method, rate)]
    return started(words, place, place.folder / f"{_name(method, rate)}.log")


def _flags(place: Place, method: str, rate: str) -> list[str]:
    """A run, or one to go on with: on the books, or of the recipe tiny."""
    directory = _directory(place, method, rate)
    if any(directory.rglob("*.sha256")):
        return ["--resume", str(directory)]
    shutil.rmtree(directory, ignore_errors=True)  # it was ended before its first checkpoint
    run = ["--name", directory.name, "--runs", str(place.folder), *METHODS[method], "--trackers"]
    if place.dry:
        text = place.folder / "text.jsonl"
        text.write_text("".join(json.dumps({"text": f"line {i} of a text. " * 9}) + "\n" for i in range(200)))
        flags = ["tiny", "--data.train", str(text), "--data.held-out-fraction", "0.1", "--num-tokens", "51200"]
    else:
        books = place.data / "books"
        text = ["--data.train", str(books / "train.jsonl"), "--data.held-out", str(books / "valid_chapters.jsonl")]
        flags = ["35m", *text, *(str(word) for flag in _SIZES.items() for word in flag), "--compile"]
    return [*flags, *run, "--optimizer.learning-rate", rate]


def _directory(place: Place, method: str, rate: str) -> Path:
    return place.folder / _name(method, rate)


def _last_step(directory: Path) -> int:
    metrics = directory / "metrics-0.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def _summary(place: Place, method: str, rate: str) -> Row:
    """The end of a run; its speed is that of one of several on the GPU."""
    summary = json.loads((_directory(place, method, rate) / "summary.json").read_text())
    names = ("num_params", "num_tokens", "num_steps", "eval_loss", "eval_standard_error", "tokens_per_second")
    return {name: summary[name] for name in (*names, "bytes_sent_per_replica", "outer_hash")}


def _gap(place: Place) -> Row:
    """The held-out loss of Streaming relative to Data-Parallel's, each at its best rate."""
    rates = place.size(RATES, RATES[:1])
    losses = {method: min(_summary(place, method, rate)["eval_loss"] for rate in rates) for method in METHODS}
    relative = losses["streaming_overlapped_fp4"] / losses["data_parallel"] - 1
    return {**losses, "relative": round(relative, 5), "ok": place.goal(relative < _MOST_WORSE)}
