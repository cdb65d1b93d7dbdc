"""The loss of a replica that joins a run amid it, beside the losses of those that were there."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.errors import DilocoError
from diloco.rendezvous.status import Look

OLD, JOINER = ("a", "b"), "joiner"
SPANS = ((0, 5), (5, 10), (10, 20), (20, 40), (40, 80), (80, 160))
"""Inner steps of the joiner, of which the mean is shown."""


def measure(output: Path, num_tokens: int, train_flags: Sequence[str]) -> None:
    """Train with two replicas, and with a third from the middle on; print the table of losses.

    Args:
        output: the directory of the run; an earlier one there is only printed.
        num_tokens: the run's budget.
        train_flags: recipe and further flags of `diloco train`.
    """
    if not (output / "runs" / JOINER / "summary.json").exists():
        _train(output, num_tokens, train_flags)
    metrics = {name: _metrics(output / "runs" / name) for name in (*OLD, JOINER)}
    joiner = metrics[JOINER]
    print("| steps of the joiner | its training loss | that of the others | held-out loss of Θ, joiner | others |")
    print("|---" * 5 + "|")
    for first, last in SPANS:
        own = [row for row in joiner if first < row["step"] <= last]
        if not own:
            break
        others = [
            row for name in OLD for row in metrics[name] if own[0]["tokens"] <= row["tokens"] <= own[-1]["tokens"]
        ]
        cells = [_mean(rows, kind) for kind in ("loss", "eval_loss") for rows in (own, others)]
        print(f"| {first + 1} to {last} | " + " | ".join(cells) + " |")


def _train(output: Path, num_tokens: int, train_flags: Sequence[str]) -> None:
    url = output / "store"
    flags = [*train_flags, "--num-tokens", str(num_tokens), "--rendezvous", str(url)]
    flags += ["--runs", str(output / "runs"), "--data.cache", str(output / "data")]
    processes = []
    try:
        for name in (*OLD, JOINER):
            processes.append(_prepare(output, name, flags))
        *old, joiner = processes
        for process in old:
            _begin(process)
        deadline = time.monotonic() + 1800
        while _tokens(str(url)) < num_tokens // 2:
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.2)
        _begin(joiner)
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(codes), f"a replica has failed: see {output}"


_REPLICA = """
import sys
import diloco.training.loop
from diloco.__main__ import main
sys.stdin.readline()
main()
"""


def _prepare(output: Path, name: str, flags: Sequence[str]) -> "subprocess.Popen[bytes]":
    """A replica that has made its imports, which take seconds, and waits for a line."""
    command = [sys.executable, "-c", _REPLICA, "train", *flags, "--name", name]
    with (output / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _begin(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with process.stdin as line:
        line.write(b"\n")


def _tokens(url: str) -> int:
    try:
        return Look(url).again().tokens
    except DilocoError:
        return 0  # there is no run yet


def _metrics(run: Path) -> list[dict[str, Any]]:
    (file,) = run.glob("metrics*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _mean(rows: Sequence[dict[str, Any]], kind: str) -> str:
    values = [row[kind] for row in rows if row.get(kind) is not None]
    return f"{statistics.mean(values):.3f}" if values else "–"
