"""35M parameters at 20 tokens each: Data-Parallel, and Streaming with two replicas that share the GPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from gpu.place import Measurements, OutOfTimeError, Place, Row

_MOST_WORSE = 0.01  # goal: the held-out loss of Streaming above that of Data-Parallel
_SECONDS_TO_END = 20.0
METHODS = {
    "data_parallel": ["--method", "data_parallel", "--num-replicas", "1"],
    "streaming_overlapped_fp4": ["--method", "streaming_overlapped_fp4", "--num-replicas", "2"],
}


def measurements(place: Place) -> Measurements:
    return {**{method: partial(_run, place, method) for method in METHODS}, "gap": partial(_gap, place)}


def _run(place: Place, method: str) -> Row:
    """Train, or go on; a run that has no time left is ended after its next checkpoint, and goes on next time.

    With the same global batch and one process, Data-Parallel has the bits of gradients that replicas average.
    """
    directory = place.folder / method
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco", "train", *_flags(place, method, directory)],
        cwd=place.folder,
        start_new_session=True,
        stdout=(place.folder / f"{method}.log").open("a"),
        stderr=subprocess.STDOUT,
    )
    try:
        process.wait(max(1.0, place.deadline - time.monotonic() - _SECONDS_TO_END))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise OutOfTimeError(f"{method} stands at step {_last_step(directory)}") from None
    if process.returncode:
        return {"error": (place.folder / f"{method}.log").read_text()[-500:]}
    summary = json.loads((directory / "summary.json").read_text())
    text = json.loads((directory / "data.json").read_text())
    names = ("num_params", "num_tokens", "eval_loss", "eval_standard_error", "wall_seconds", "tokens_per_second")
    more = ("model_flops_utilization", "peak_memory_bytes", "compute_utilization", "bytes_sent_per_replica")
    row = {name: summary[name] for name in (*names, *more)}
    return row | {"text": text, "times_each_token_was_read": _epochs(summary["num_tokens"], text)}


def _flags(place: Place, method: str, directory: Path) -> list[str]:
    """A run, or one to go on with: of the recipe 35m on the books, or of the recipe tiny."""
    if any(directory.rglob("*.sha256")):
        return ["--resume", str(directory)]
    shutil.rmtree(directory, ignore_errors=True)  # it was ended before its first checkpoint
    name = ["--name", method, "--runs", str(place.folder)]
    if place.dry:
        text = place.folder / "text.jsonl"
        text.write_text("".join(json.dumps({"text": f"line {i} of a text. " * 9}) + "\n" for i in range(200)))
        flags = ["tiny", "--data.train", str(text), "--data.held-out-fraction", "0.1", "--num-tokens", "10240"]
    else:
        books, tokenizers = place.data / "books", place.data / "tokenizers"
        flags = [
            *("35m", "--data.train", str(books / "train.jsonl")),
            *("--data.held-out", str(books / "valid_chapters.jsonl")),
            *("--data.tokenizer", str(tokenizers / "sentencepiece_cc_all.32000.100extra.model")),
            *("--compile", "--micro-batch", "16", "--checkpoint.every-steps", "250"),
        ]
    return [*flags, *name, *METHODS[method], "--trackers"]


def _last_step(directory: Path) -> int:
    metrics = directory / "metrics-0.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def _epochs(num_tokens: int, text: Row) -> float | None:
    """The number of times that each token of the text was read, on average: the text is short."""
    total = next((value for name, value in text.items() if "tokens" in name and isinstance(value, int)), None)
    return None if not total else round(num_tokens / total, 1)


def _gap(place: Place) -> Row:
    """The held-out loss of Streaming relative to Data-Parallel's."""
    losses = {}
    for method in METHODS:
        summary = place.folder / method / "summary.json"
        if not summary.exists():
            return {"error": f"{method} has not ended"}
        losses[method] = json.loads(summary.read_text())["eval_loss"]
    gap = losses["streaming_overlapped_fp4"] / losses["data_parallel"] - 1
    return {"gap": round(gap, 5), "ok": place.goal(gap < _MOST_WORSE)}
