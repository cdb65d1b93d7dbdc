"""Outer hashes and losses of a fixed set of small runs, to show that a change of the code changed no number.

Write them with the code before the change, and compare them with the code after it, on the same machine:

    python benchmarks/golden.py golden.json              # writes the file
    python benchmarks/golden.py golden.json --compare    # exits with 1 if a run differs in any bit
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OVERLAP_OF_ITS_OWN = ["--diloco.overlap-steps", "2", "7"]
RUNS: dict[str, list[str]] = {
    "streaming": [],
    "streaming_1_replica": ["--num-replicas", "1"],
    "streaming_3_replicas": ["--num-replicas", "3", "--global-batch", "9", "--num-tokens", str(60 * 9 * 64)],
    "diloco": ["--method", "diloco"],
    "diloco_3_replicas": [
        *("--method", "diloco", "--num-replicas", "3", "--global-batch", "9", "--num-tokens", str(60 * 9 * 64)),
    ],
    "method_streaming": ["--method", "streaming"],
    "method_streaming_overlapped": ["--method", "streaming_overlapped"],
    "data_parallel": ["--method", "data_parallel"],
    "int4": ["--diloco.wire", "int4"],
    "topk": ["--diloco.wire", "topk:density=0.05"],
    "dare": ["--diloco.wire", "dare:density=0.5,values=bf16"],
    "stochastic": ["--diloco.wire", "e3m0:stochastic=true"],
    "fp32": ["--diloco.wire", "fp32", "--diloco.overlap-steps", "0", "--diloco.first-sync", "early"],
    "reduce_scatter": ["--diloco.combine", "reduce_scatter"],
    "reduce_scatter_3_replicas": [
        *("--diloco.combine", "reduce_scatter:bf16", "--num-replicas", "3"),
        *("--global-batch", "9", "--num-tokens", str(60 * 9 * 64)),
    ],
    "overlap_of_its_own": OVERLAP_OF_ITS_OWN,
    "error_feedback": ["--diloco.wire", "topk:density=0.05", "--diloco.error-feedback", "0.9"],
    "error_feedback_reduce_scatter": ["--diloco.error-feedback", "1.0", "--diloco.combine", "reduce_scatter"],
    "sequential_freeze": ["--diloco.fragments", "sequential", "--diloco.freeze"],
    "sharded": ["--shards-per-replica", "2"],
    "resumed": OVERLAP_OF_ITS_OWN,
    "resumed_reduce_scatter": [*OVERLAP_OF_ITS_OWN, "--diloco.combine", "reduce_scatter"],
}
KILLED_AFTER_STEP = 45


def golden(name: str, folder: Path) -> dict[str, str | float]:
    """The numbers of a run that must not change in any bit."""
    flags = ["--name", name, "--data.train", "text.jsonl", "--data.held-out-fraction", "0.1", *RUNS[name]]
    run = folder / "runs" / name
    if name.startswith("resumed"):
        kill_after(KILLED_AFTER_STEP, flags, run)
        flags = ["--resume", str(run)]
    call(flags, folder)
    summary = json.loads((run / "summary.json").read_text())
    digest = hashlib.sha256()
    for metrics in sorted(run.glob("metrics-*.jsonl")):
        for line in metrics.read_text().splitlines():
            digest.update(repr(json.loads(line)["loss"]).encode())
    return {
        "outer_hash": summary["outer_hash"],
        "eval_loss": summary["eval_loss"],
        "training_losses": digest.hexdigest(),
        "bytes_sent_per_replica": summary["bytes_sent_per_replica"],
    }


def command(flags: list[str]) -> list[str]:
    return [sys.executable, "-m", "diloco", "train", "tiny", *flags]


def call(flags: list[str], folder: Path) -> None:
    process = subprocess.run(command(flags), cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(flags)} failed: {process.stdout}{process.stderr}")


def kill_after(step: int, flags: list[str], run: Path) -> None:
    """Kill a run, launcher and replicas, when replica 0 has taken a step and saved a checkpoint."""
    process = subprocess.Popen(
        command(flags), cwd=run.parent.parent, stdout=subprocess.DEVNULL, start_new_session=True
    )
    metrics = run / "metrics-0.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= step):
        if process.poll() is not None:
            raise SystemExit(f"the run ended before step {step}")
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1)


def write_text(path: Path) -> None:
    """Sentences that a tiny model can learn something of."""
    subjects, verbs, objects = ("the cat", "a ship", "my aunt"), ("sees", "carries"), ("rain", "salt", "him")
    sentences = [f"{s} {v} {o}, {i}." for i in range(60) for s in subjects for v in verbs for o in objects]
    rows = [{"id": str(i), "text": " ".join(sentences[i : i + 30])} for i in range(0, len(sentences), 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    options = parser.parse_args()
    expected = json.loads(options.file.read_text()) if options.compare else {}
    measured: dict[str, dict[str, str | float]] = {}
    differing = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl")
        for run in options.runs:
            measured[run] = golden(run, folder)
            if options.compare and measured[run] != expected[run]:
                differing.append(run)
            state = "differs" if run in differing else "equal" if options.compare else "written"
            print(f"{run}: {measured[run]['outer_hash']} {measured[run]['eval_loss']:.6f} {state}", flush=True)
    if not options.compare:
        options.file.write_text(json.dumps(measured, indent=2) + "\n")
    if differing:
        raise SystemExit(f"{len(differing)} runs differ: {', '.join(differing)}")


if __name__ == "__main__":
    main()
