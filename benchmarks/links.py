"""Every method on real sockets through real bandwidth limits, beside what the simulator predicts; needs root.

    python benchmarks/links.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

Two replicas, each in a network namespace of its own, train the laptop recipe's model on the same tokens with the
same inner optimizer: Data-Parallel is DistributedDataParallel in FP32, with three bucket sizes, and with its bf16
hook; torchft_diloco needs the package torchft-nightly (see README.md beside this file), and is measured without a
limit, too, for the prediction: what it loses there it loses everywhere.

Compute utilization is, for every method, what as many steps take without exchange, `alone`, right before and after
it, over what they took with it, from the second period of H steps on. Methods take turns, `--repeats` times, and
what is printed are medians. What was measured is written at once, to DIR/links.csv, and the steps alone to
DIR/alone.jsonl; a call that was interrupted, or asks for more, goes on from there, and makes predictions anew.
DIR/links.svg is the figure.
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
from itertools import count, groupby
from pathlib import Path

import numpy as np
from links_points import (
    ENGINE,
    NUM_REPLICAS,
    PEER,
    UNLIMITED_MBIT_S,
    Key,
    draw,
    key,
    num_steps,
    points,
    report,
    report_payloads,
)
from network.laboratory import Laboratory

from diloco.training.config import TrainConfig
from diloco.training.prepare import prepare_run
from diloco.training.recipes import laptop
from diloco.training.traits import to_json

BUCKETS_MB = ("1", "4", "25")
PAYLOAD_BYTES = 32_000_000
ALONE_STEPS = 30
_ROUNDS = count(100_000)


def main() -> None:
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    config = _config(arguments)
    rows, alone = _read(arguments.output / "links.csv"), _read_alone(arguments.output / "alone.jsonl")
    asked = [(mbit_s, arguments.methods) for mbit_s in arguments.bandwidths]
    asked += [(UNLIMITED_MBIT_S, [PEER])] if PEER in arguments.methods else []
    missing = [
        {"repeat": float(repeat), "mbit_s": mbit_s, "method": method}
        for repeat in range(arguments.repeats)
        for mbit_s, methods in asked
        for method in _variants(methods)
    ]
    missing = [row for row in missing if key(row) not in {key(known) for known in rows}]
    if missing:
        with (
            Laboratory(
                NUM_REPLICAS, emulator=arguments.emulator, congestion_control=arguments.congestion_control
            ) as laboratory,
            _replicas(laboratory, config) as both,
        ):
            for _, group in groupby(missing, lambda row: (row["repeat"], row["mbit_s"])):
                for row, alone_SxM in measure(laboratory, both, config, arguments, list(group)):
                    rows.append(row)
                    if alone_SxM is not None:
                        alone[key(row)] = alone_SxM
                        _append_alone(arguments.output / "alone.jsonl", row, alone_SxM)
                    _write(rows, arguments.output / "links.csv")
    report_payloads(rows)
    if found := points(rows, alone, config):
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
    parser.add_argument("--connections", type=int, default=1, help="between two replicas")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="about how long a run of Data-Parallel may take"
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
    """As a replica knows them; what reduces comes after what its prediction wants."""
    variants = []
    for method in methods:
        if method.startswith("data_parallel") or method == PEER:
            wire = "bf16" if method == "data_parallel_bf16" else "fp32"
            hook = ",bf16" if wire == "bf16" else ""
            buckets = [] if method == PEER else [f"{method}:{size}{hook}" for size in BUCKETS_MB]
            variants += [f"all_reduce:{wire}", *(buckets or [method])]
        else:
            variants.append(method)
    return list(dict.fromkeys(variants))


def _config(arguments: argparse.Namespace) -> TrainConfig:
    recipe = laptop()
    asked = replace(
        recipe,
        name="links",
        recipe="laptop",
        num_replicas=NUM_REPLICAS,
        global_batch=arguments.global_batch,
        num_tokens=90 * arguments.global_batch * recipe.sequence_length,
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
    wanted: Sequence[dict],
) -> Iterator[tuple[dict, np.ndarray | None]]:
    """A row for each method at one bandwidth, and what steps took without exchange before and after it, (S, M)."""
    mbit_s = wanted[0]["mbit_s"]
    laboratory.set_links(gbit_s=mbit_s / 1000, latency_seconds=arguments.latency_ms / 1000, loss=arguments.loss)
    link = _means(ask(replicas, {"measure": "link"}))
    before = None
    for row in wanted:
        name, _, option = row["method"].partition(":")
        if name == "payload":
            question = {"measure": name, "num_bytes": PAYLOAD_BYTES, "round": next(_ROUNDS)}
            yield row | link | _means(ask(replicas, question)), None
            continue
        if name == "all_reduce":
            reduced_seconds = 32e-9 * config.model.num_matrix_params / link["link_gbit_s"]
            question = {"measure": name, "wire": option, "num_rounds": max(2, round(4 / reduced_seconds))}
            yield row | link | _means(ask(replicas, question)), None
            continue
        before = before or ask(replicas, {"method": "alone", "num_steps": ALONE_STEPS})
        warm, measured = num_steps(row["method"], config, link["link_gbit_s"], arguments.seconds)
        question = {"method": row["method"], "num_steps": warm + measured}
        question["evaluate"] = row["repeat"] == 0 and mbit_s == max(arguments.bandwidths)
        question["evaluate"] &= warm + measured == config.num_steps
        with _lighthouse(laboratory) if name == PEER else nullcontext("") as question["lighthouse"]:
            answers = ask(replicas, question)
        after = ask(replicas, {"method": "alone", "num_steps": ALONE_STEPS})
        if len({answer["outer_hash"] for answer in answers}) > 1:
            raise RuntimeError(f"after {row['method']} the replicas have different outer parameters")
        steps = [[np.diff(answer["ends"], prepend=0.0) for answer in run] for run in (before, after)]
        wall_seconds = statistics.mean(answer["ends"][-1] - answer["ends"][warm - 1] for answer in answers)
        found = {"warm_steps": warm, "measured_steps": measured, "wall_seconds": wall_seconds}
        found["alone_after_seconds"] = statistics.mean(answer["after_seconds"] for answer in before + after)
        found["outer_hash"] = answers[0]["outer_hash"][:16]
        told = [{k: v for k, v in answer.items() if k not in ("ends", "outer_hash")} for answer in answers]
        print(f"{mbit_s:g} Mbit/s  {row['method']}  {wall_seconds / measured:.4f} s a step", flush=True)
        yield row | link | _means(told) | found, np.vstack([np.stack(run, axis=1) for run in steps])
        before = after


def _means(answers: Sequence[dict]) -> dict:
    """Over the replicas."""
    return {name: statistics.mean(answer[name] for answer in answers) for name in answers[0]}


def _read(path: Path) -> list[dict]:
    """The rows of an earlier call; numbers as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _read_alone(path: Path) -> dict[Key, np.ndarray]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {key(told): np.array(told["seconds_SxM"]) for told in map(json.loads, lines)}


def _append_alone(path: Path, row: dict, seconds_SxM: np.ndarray) -> None:
    told = dict(zip(("repeat", "mbit_s", "method"), key(row), strict=True))
    with path.open("a") as file:
        file.write(json.dumps(told | {"seconds_SxM": seconds_SxM.round(6).tolist()}) + "\n")


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
