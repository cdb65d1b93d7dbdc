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

from diloco.auto import chosen

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
SEQUENCE, BATCH, SYNC_EVERY, MIXING = 128, 16, 20, 0.5
COLUMNS: tuple[str, ...] = (
    *("arm", "outer", "seed", "held_out_loss", "standard_error", "tokens", "bytes_sent", "seconds"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--pretrain", "--train", "--held-out", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    base = pretrained(arguments)
    lr, momentum = chosen(arguments.steps // SYNC_EVERY, 2, SYNC_EVERY, MIXING)
    outers = {
        "auto": f"nesterov:lr={lr},momentum={momentum}",
        "averaging": "sgd:lr=1",
        "default": "nesterov:lr=0.4,momentum=0.9",
    }
    table = output / "two_homes.csv"
    done = {(row["arm"], row["seed"]) for row in csv.DictReader(table.open())} if table.exists() else set()
    for seed in arguments.seeds:
        for arm, outer in {"one trainer": "", **outers}.items():
            if (arm, str(seed)) not in done:
                append(table, {"arm": arm, "outer": outer, "seed": seed, **run(arguments, base, outer, seed)})
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
        wait(start(arguments.output, "pretrained", [*flags, *common(0, 4e-3)]))
        diloco = [sys.executable, "-m", "diloco"]
        exported = ["export", "runs/pretrained", "--to", "hf", "--output", "base"]
        subprocess.run([*diloco, *exported], cwd=arguments.output, check=True)
    return folder


def common(seed: int, learning_rate: float) -> list[str]:
    """The flags of all runs."""
    flags = ["--global-batch", str(BATCH), "--sequence-length", str(SEQUENCE), "--seed", str(seed)]
    flags += ["--optimizer.learning-rate", str(learning_rate), "--evaluation.num-tokens", "500000"]
    return [*flags, "--trackers", "--device", "cpu", "--precision", "fp32"]


def run(arguments: argparse.Namespace, base: Path, outer: str, seed: int) -> dict[str, Any]:
    """Train by one trainer, or with an outer rule in two homes, and read what came out."""
    flags = ["--model.hf", str(base.absolute()), "--model.lora", "rank=8"]
    flags += ["--data.train", str(arguments.train), "--data.held-out", str(arguments.held_out)]
    flags += ["--num-tokens", str(arguments.steps * BATCH * SEQUENCE), *common(seed, arguments.learning_rate)]
    names = ["home", "away"] if outer else ["alone"]
    for name in ("meeting", *(f"runs/{name}" for name in names)):
        shutil.rmtree(arguments.output / name, ignore_errors=True)
    if outer:
        flags += ["--rendezvous", "meeting", "--num-replicas", "2", "--diloco.outer", outer]
        flags += ["--diloco.sync-every", str(SYNC_EVERY), "--diloco.mixing", str(MIXING)]
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


def report(table: Path) -> None:
    """Print each loss, and its difference from the one trainer's of the same seed."""
    rows = list(csv.DictReader(table.open()))
    alone = {row["seed"]: float(row["held_out_loss"]) for row in rows if row["arm"] == "one trainer"}
    for row in rows:
        loss = float(row["held_out_loss"])
        print(f"{row['arm']:12} seed {row['seed']}  {loss:.4f}  {100 * (loss / alone[row['seed']] - 1):+.2f} %")


if __name__ == "__main__":
    main()
