"""Every method on real sockets through real bandwidth limits, beside what the simulator predicts; needs root.

    python benchmarks/links.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

Two replicas, each in a network namespace of its own, train the laptop recipe's model on the same tokens with the
same inner optimizer: Data-Parallel is DistributedDataParallel in FP32, with three bucket sizes, and with its bf16
hook; torchft_diloco needs the package torchft-nightly (see README.md beside this file).

Compute utilization is compute time over all time. What a step's optimizer and sync take beyond their median in the
run is waiting, and so is the end of the run; of Data-Parallel, which waits in every step, compute is what `alone`
takes, which exchanges nothing. Methods take turns, `--repeats` times, and what is printed are medians. The rows of
a bandwidth are written to DIR/links.csv when all its methods were measured, and a run that was interrupted goes on
from there; DIR/links.svg is the figure.
"""

import argparse
import csv
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from links_points import (
    ENGINE,
    NUM_REPLICAS,
    PEER,
    draw,
    points,
    report,
    report_payloads,
    with_utilization,
)
from network.laboratory import Laboratory

from diloco.models.ladder import num_matrix_params
from diloco.training.config import TrainConfig, to_json
from diloco.training.recipes import laptop
from diloco.training.start import prepare_run

BUCKETS_MB = ("1", "4", "25")
PAYLOAD_BYTES = 32_000_000
_ROUNDS = count(100_000)


def main() -> None:
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    config = _config(arguments)
    rows = _read(arguments.output / "links.csv")
    with (
        Laboratory(
            NUM_REPLICAS, emulator=arguments.emulator, congestion_control=arguments.congestion_control
        ) as laboratory,
        _replicas(laboratory, config) as both,
    ):
        for repeat in range(arguments.repeats):
            for mbit_s in arguments.bandwidths:
                if any((row["repeat"], row["mbit_s"]) == (repeat, mbit_s) for row in rows):
                    continue
                laboratory.set_links(
                    gbit_s=mbit_s / 1000, latency_seconds=arguments.latency_ms / 1000, loss=arguments.loss
                )
                evaluated = repeat == 0 and mbit_s == max(arguments.bandwidths)
                measured = measure(laboratory, both, config, arguments, evaluated=evaluated)
                rows += [{"repeat": repeat, "mbit_s": mbit_s, **row} for row in measured]
                _write(rows, arguments.output / "links.csv")
    report_payloads(rows)
    if found := points(rows, config):
        report(found)
        draw(found, arguments.output / "links.svg")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--bandwidths", type=_list_of(float), default=[10.0, 30.0, 100.0, 300.0, 1000.0], help="Mbit/s"
    )
    methods = ["payload", "data_parallel", "data_parallel_bf16", *ENGINE, "streaming_overlapped_fp4:9", PEER]
    parser.add_argument("--methods", type=_list_of(str), default=methods)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--connections", type=int, default=1, help="between two replicas")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="about how long a run of Data-Parallel may take"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--emulator", type=Path, help="C source of a link emulator, for latency and loss")
    parser.add_argument("--congestion-control", default="cubic", help="TCP's, such as bbr")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way, with an emulator")
    parser.add_argument("--loss", type=float, default=0.0)
    return parser.parse_args()


def _list_of(kind: type) -> object:
    return lambda text: [kind(part) for part in text.split(",")]


def _variants(methods: Sequence[str]) -> list[str]:
    """As a replica knows them; `alone` comes first, and again last, since the machine may slow down meanwhile."""
    variants = []
    for method in methods:
        if method.startswith("data_parallel"):
            wire = "bf16" if method == "data_parallel_bf16" else "fp32"
            hook = ",bf16" if wire == "bf16" else ""
            variants += [f"all_reduce:{wire}", *(f"{method}:{size}{hook}" for size in BUCKETS_MB)]
        else:
            variants.append(method)
    return variants if variants == ["payload"] else ["alone", *variants, "alone again"]


def _config(arguments: argparse.Namespace) -> TrainConfig:
    recipe = laptop()
    asked = replace(
        recipe,
        name="links",
        recipe="laptop",
        num_replicas=NUM_REPLICAS,
        global_batch=arguments.global_batch,
        num_tokens=arguments.steps * arguments.global_batch * recipe.sequence_length,
        optimizer=replace(recipe.optimizer, learning_rate=arguments.learning_rate),
        diloco=replace(recipe.diloco, first_sync="early"),
        num_connections=arguments.connections,
        evaluation=replace(recipe.evaluation, num_tokens=1_000_000),
        runs=arguments.output / "runs",
        timeout_seconds=3600.0,
        data=replace(
            recipe.data,
            train=(str(arguments.train),),
            held_out=(str(arguments.held_out),),
            cache=arguments.output / "data",
        ),
    )
    return prepare_run(asked, resume=None)


@contextmanager
def _replicas(laboratory: Laboratory, config: TrainConfig) -> "Iterator[list[subprocess.Popen[str]]]":
    """The replicas' processes, and torchft's lighthouse beside the first."""
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.json"
        file.write_text(json.dumps(to_json(config)))
        laboratory.set_links(gbit_s=1.0)
        first = laboratory.address(0)
        yield [
            laboratory.start(
                replica,
                [sys.executable, str(Path(__file__).with_name("links_replica.py")), str(file)],
                environment={
                    "RANK": str(replica),
                    "WORLD_SIZE": str(NUM_REPLICAS),
                    "LOCAL_RANK": "0",
                    "MASTER_ADDR": first,
                    "MASTER_PORT": "29512",
                    "GLOO_SOCKET_IFNAME": laboratory.interface,
                    "OMP_NUM_THREADS": "1",
                    "REPLICA_ADDRESS": laboratory.address(replica),
                    "RUST_LOG": "error",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for replica in range(NUM_REPLICAS)
        ]


@contextmanager
def _lighthouse(laboratory: Laboratory) -> Iterator[str]:
    """The address of torchft's; a new one for each run, since one waits for the managers of the run before."""
    told = [
        "--min_replicas",
        str(NUM_REPLICAS),
        "--join_timeout_ms",
        "600000",
        "--heartbeat_timeout_ms",
        "3600000",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{laboratory.address(0)}:{free.getsockname()[1]}"
    process = laboratory.start(
        0,
        [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", address, *told],
        environment={"RUST_LOG": "error"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(1.0)
    try:
        yield f"http://{address}"
    finally:
        process.kill()


def ask(replicas: "list[subprocess.Popen[str]]", question: dict) -> list[dict]:
    """What each replica answers."""
    for process in replicas:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    answers = []
    for process in replicas:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError(f"a replica ended with exit code {process.wait()}")
        answers.append(json.loads(line))
    return answers


def measure(
    laboratory: Laboratory,
    replicas: "list[subprocess.Popen[str]]",
    config: TrainConfig,
    arguments: argparse.Namespace,
    *,
    evaluated: bool,
) -> list[dict]:
    """A row for each method, at one bandwidth."""
    link = _means(ask(replicas, {"measure": "link"}))
    reduced_seconds = 32e-9 * num_matrix_params(config.model) / link["link_gbit_s"]  # an all-reduce, about
    rows, computed = [], {}
    for method in _variants(arguments.methods):
        name, _, option = method.partition(":")
        if name == "payload":
            question = {"measure": name, "num_bytes": PAYLOAD_BYTES, "round": next(_ROUNDS)}
            rows.append({"method": method, **link, **_means(ask(replicas, question))})
            continue
        if name == "all_reduce":
            question = {"measure": name, "wire": option, "num_rounds": max(2, round(4 / reduced_seconds))}
            rows.append({"method": method, **link, **_means(ask(replicas, question))})
            continue
        num_steps = config.num_steps
        if name.startswith("data_parallel"):
            # All its steps are alike: where they take long, a few will do.
            num_steps = max(4, min(num_steps, round(arguments.seconds / reduced_seconds)))
        question = {"method": method.removesuffix(" again"), "num_steps": num_steps}
        question["evaluate"] = evaluated and num_steps == config.num_steps
        with _lighthouse(laboratory) if method == PEER else nullcontext("") as question["lighthouse"]:
            answers = ask(replicas, question)
        computed[method] = np.stack([answer.pop("computed") for answer in answers], axis=1)
        hashes = {answer.pop("outer_hash") for answer in answers}
        if len(hashes) > 1 and not method.startswith("alone"):
            raise RuntimeError(f"after {method} the replicas have different outer parameters")
        means = _means(answers)
        rows.append({"method": method, "num_steps": num_steps, **link, **means, "outer_hash": min(hashes)[:16]})
        link_mbit_s = 1000 * link["link_gbit_s"]
        print(f"{link_mbit_s:.1f} Mbit/s  {method}  {means['wall_seconds'] / num_steps:.4f} s a step", flush=True)
    return with_utilization(rows, computed, config)


def _means(answers: Sequence[dict]) -> dict:
    """Over the replicas."""
    return {name: statistics.mean(answer[name] for answer in answers) for name in answers[0]}


def _read(path: Path) -> list[dict]:
    """The rows of an earlier call; numbers as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _write(rows: list[dict], path: Path) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
