"""Two homes fine-tune one model through a store, against one trainer on all data at equal tokens.

    python benchmarks/two_homes.py --pretrain BOOKS.jsonl --train TRAIN.jsonl --held-out VALID.jsonl --output DIR

A small Llama of transformers is pretrained on one kind of text, and LoRA adapters of it are trained on another: by
one trainer with the whole batch, and by two replicas that meet in a directory, each a process with half of the
batch, which start together and wait for nobody. All runs read the same tokens at the same learning rate. Every run
is one row of DIR/two_homes.csv, and is not run again.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
SEQUENCE, BATCH = 128, 16
COLUMNS: tuple[str, ...] = (
    *("outer", "sync_every", "batch", "learning_rate", "seed"),
    *("held_out_loss", "standard_error", "tokens", "bytes_sent", "seconds"),
)
ARMS = tuple(
    (outer, sync_every, batch, learning_rate)
    for learning_rate in (8e-3, 4e-3, 1.6e-2)
    for outer, sync_every, batch in (("", 1, BATCH), ("auto", 20, BATCH), ("", 1, BATCH // 2))
) + tuple(
    (outer, sync_every, BATCH, learning_rate)
    for outer, sync_every, learning_rate in (
        *(("sgd:lr=1", 20, 4e-3), ("auto", 10, 4e-3), ("auto", 5, 4e-3)),
        ("auto", 10, 1.6e-2),
    )
)
"""The outer rule of two homes, or nothing for one trainer; H; sequences per step of all; and the learning rate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--pretrain", "--train", "--held-out", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", type=int, default=len(ARMS), help="run the first so many for each seed")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    base = pretrained(arguments)
    table = output / "two_homes.csv"
    done = {tuple(row[name] for name in COLUMNS[:5]) for row in rows_of(table)} if table.exists() else set()
    for seed in arguments.seeds:
        for arm in ARMS[: arguments.arms]:
            row: dict[str, Any] = dict(zip(COLUMNS, (*arm, seed), strict=False))
            if tuple(map(str, row.values())) not in done:
                append(table, {**row, **run(arguments, base, **row)})
    report(table)


def pretrained(arguments: argparse.Namespace) -> Path:
    """The directory of the model to fine-tune."""
    folder = arguments.output / "base"
    if not folder.exists():
        config = arguments.output / "llama.json"
        config.write_text(json.dumps(LLAMA))
        text = ["--data.train", str(arguments.pretrain), "--data.held-out", str(arguments.held_out)]
        flags = ["--model.hf", str(config), "--method", "data_parallel", "--num-replicas", "1", *text]
        flags += ["--num-tokens", str(arguments.pretrain_steps * BATCH * SEQUENCE)]
        wait(start(arguments.output, "pretrained", [*flags, *common(0, BATCH, 4e-3)]))
        diloco = [sys.executable, "-m", "diloco"]
        exported = ["export", "runs/pretrained", "--to", "hf", "--output", "base"]
        subprocess.run([*diloco, *exported], cwd=arguments.output, check=True)
    return folder


def common(seed: int, batch: int, learning_rate: float) -> list[str]:
    """The flags of all runs."""
    flags = ["--global-batch", str(batch), "--sequence-length", str(SEQUENCE), "--seed", str(seed)]
    flags += ["--optimizer.learning-rate", str(learning_rate), "--evaluation.num-tokens", "500000"]
    return [*flags, "--trackers", "--device", "cpu", "--precision", "fp32"]


def run(
    arguments: argparse.Namespace,
    base: Path,
    *,
    outer: str,
    sync_every: int,
    batch: int,
    learning_rate: float,
    seed: int,
) -> dict[str, Any]:
    """Train by one trainer, or with an outer rule in two homes, and read what came out."""
    flags = ["--model.hf", str(base.absolute()), "--model.lora", "rank=8"]
    flags += ["--data.train", str(arguments.train), "--data.held-out", str(arguments.held_out)]
    flags += ["--num-tokens", str(arguments.steps * batch * SEQUENCE), *common(seed, batch, learning_rate)]
    names = ["home", "away"] if outer else ["alone"]
    for name in ("meeting", *(f"runs/{name}" for name in names)):
        shutil.rmtree(arguments.output / name, ignore_errors=True)
    if outer:
        flags += ["--rendezvous", "meeting", "--num-replicas", "2", "--diloco.outer", outer]
        flags += ["--diloco.sync-every", str(sync_every)]
    else:
        flags += ["--method", "data_parallel", "--num-replicas", "1"]
    processes = [start(arguments.output, name, flags) for name in names]
    for process in processes:
        wait(process)
    summary = json.loads((arguments.output / "runs" / names[0] / "summary.json").read_text())
    read = {"held_out_loss": "eval_loss", "standard_error": "eval_standard_error", "tokens": "num_tokens"}
    read |= {"bytes_sent": "bytes_sent_per_replica", "seconds": "wall_seconds"}
    return {column: summary.get(name) for column, name in read.items()}


def start(folder: Path, name: str, flags: list[str]) -> "subprocess.Popen[bytes]":
    """A trainer of one thread, which says nothing but errors."""
    command = [sys.executable, "-m", "diloco", "train", "laptop", "--name", name, *flags]
    log = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
    )


def wait(process: "subprocess.Popen[bytes]") -> None:
    if process.wait():
        raise SystemExit(f"{process.args} failed: its log lies beside the table")


def append(table: Path, row: dict[str, Any]) -> None:
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open() as file:
        return list(csv.DictReader(file))


def report(table: Path) -> None:
    """Print each loss, and its difference from the one trainer's of the same seed and learning rate."""
    rows = rows_of(table)
    alone = {
        (row["learning_rate"], row["seed"]): float(row["held_out_loss"])
        for row in rows
        if not row["outer"] and row["batch"] == str(BATCH)
    }
    for row in rows:
        loss, names = float(row["held_out_loss"]), "  ".join(f"{row[name]:9}" for name in COLUMNS[:5])
        print(f"{names}{loss:.4f}  {100 * (loss / alone[row['learning_rate'], row['seed']] - 1):+.2f} %")


if __name__ == "__main__":
    main()
