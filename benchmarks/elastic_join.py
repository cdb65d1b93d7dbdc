"""The time to join a run in a store, against the length of its log and the size of its model; the joiner's loss.

    python benchmarks/elastic_join.py length --output DIR
    python benchmarks/elastic_join.py size --output DIR
    python benchmarks/elastic_join.py loss --output DIR -- laptop --data.train TRAIN.jsonl …

The time is that from `StoreRendezvous(…)` to the end of the first inner step, which itself does nothing, in a
process that has imported everything. The logs are real: three replicas that do nothing between outer steps make
them as fast as a directory allows, and are dead when others join. `length` joins each log in the directory, and in
SeaweedFS behind a proxy that adds latency to each request, at several lengths close by, since an index is written
every 8 rounds. `loss` trains with two replicas, and with a third from the middle on.

Every measurement is written at once to DIR/length.jsonl and DIR/size.jsonl; a later call measures what is missing.
"""

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from elastic_study import joiner_loss
from elastic_study.replica import Replica, Server, environment, network, running_seaweedfs

from diloco.rendezvous.store import Store

NUM_REPLICAS, SYNC_EVERY = 3, 8
SPACING = 9
"""Entries between two copies of a log: the next ones are at other distances from the newest index."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    length = commands.add_parser("length", help="against the length of the log")
    length.add_argument("--entries", type=_whole, default=[100, 1000, 10_000])
    length.add_argument("--copies", type=int, default=5, help="of each length")
    length.add_argument("--latency-ms", type=float, default=40.0, help="round trip to the bucket")
    length.set_defaults(run=measure_length)
    size = commands.add_parser("size", help="against the size of the model")
    size.add_argument("--parameters", type=_whole, default=[10**6, 10**7, 10**8])
    size.add_argument("--mbit-s", type=float, default=1000.0, help="to the bucket")
    size.add_argument("--latency-ms", type=float, default=40.0)
    size.add_argument("--repeats", type=int, default=3)
    size.set_defaults(run=measure_size)
    loss = commands.add_parser("loss", help="the joiner's loss beside the others'")
    loss.add_argument("--output", type=Path, required=True)
    loss.add_argument("--num-tokens", type=int, default=1_499_136)
    loss.add_argument("train", nargs="+", help="after --: recipe and flags of diloco train")
    loss.set_defaults(run=lambda parsed: joiner_loss.measure(parsed.output, parsed.num_tokens, parsed.train))
    for command in (length, size):
        command.add_argument("--output", type=Path, required=True)
        command.add_argument("--fragments", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


def measure_length(arguments: argparse.Namespace) -> None:
    """Make the logs that are missing, join each, and print the table."""
    output, latency_ms = arguments.output, arguments.latency_ms
    model = {"elements": 1000, "num_fragments": arguments.fragments, "sync_every": SYNC_EVERY}
    logs = [
        (entries, output / f"log-{entries}-{copy}")
        for entries in arguments.entries
        for copy in range(arguments.copies)
    ]
    if not all(log.is_dir() for _, log in logs):
        for (entries, log), made in zip(logs, _logs(model, logs), strict=True):
            shutil.copytree(made, log)
            print(f"made a log of {entries} entries: {log}", flush=True)
    rows = _rows(output / "length.jsonl")
    if missing := [(entries, log) for entries, log in logs if (entries, log.name) not in rows]:
        with tempfile.TemporaryDirectory() as folder, running_seaweedfs(Path(folder)) as server:
            for entries, log in missing:
                rows[entries, log.name] = _join_both(server, log, model, latency_ms=latency_ms)
                _append(output / "length.jsonl", (entries, log.name), rows[entries, log.name])
    print("| entries | after the index | outer steps replayed | reads | directory s | bucket s, median | most |")
    print("|---" * 7 + "|")
    for entries, several in groupby(sorted(rows), lambda key: key[0]):
        part = [rows[key] for key in several]
        bucket = [row["bucket"]["seconds"] for row in part]
        median = {name: statistics.median(row["bucket"][name] for row in part) for name in ("replayed", "gets")}
        after_index = statistics.median(row["after_index"] for row in part)
        print(
            f"| {entries:,} | {after_index:.0f} | {median['replayed']:.0f} | {median['gets']:.0f} "
            f"| {statistics.median(row['directory']['seconds'] for row in part):.2f} "
            f"| {statistics.median(bucket):.2f} | {max(bucket):.2f} |"
        )


def _logs(model: Row, logs: list[tuple[int, Path]]) -> Iterator[Path]:
    """The directory of a run as it grows: at each of the lengths, a few entries later for each copy."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        replicas = [
            Replica(f"{folder}/run", name=f"r{m}", poll_seconds=0.002, **model) for m in range(NUM_REPLICAS)
        ]
        for replica in replicas:
            stack.callback(replica.exchange.abort, "the log is long enough")
        number = 0
        for entries, _ in logs:
            number = max(entries, number + SPACING)
            while replicas[0].exchange.state.number < number:
                for replica in replicas:
                    replica.step()
                time.sleep(0.001)
            time.sleep(0.3)  # what is being written lands
            yield Path(folder, "run")


def measure_size(arguments: argparse.Namespace) -> None:
    """Make a run of each size, join it, and print the table."""
    rows = _rows(arguments.output / "size.jsonl")
    with tempfile.TemporaryDirectory() as folder, running_seaweedfs(Path(folder)) as server:
        for parameters in arguments.parameters:
            names = [f"repeat {repeat}" for repeat in range(arguments.repeats)]
            missing = [name for name in names if (parameters, name) not in rows]
            if not missing:
                continue
            elements = parameters // arguments.fragments
            model = {"elements": elements, "num_fragments": arguments.fragments, "sync_every": SYNC_EVERY}
            run = Path(folder, f"run-{parameters}")
            _make_run(run, model)
            for name in missing:
                row = _join_both(server, run, model, latency_ms=arguments.latency_ms, mbit_s=arguments.mbit_s)
                rows[parameters, name] = row
                _append(arguments.output / "size.jsonl", (parameters, name), row)
            shutil.rmtree(run)
    print("| parameters | MB down | directory s | bucket s | bytes alone s |")
    print("|---" * 5 + "|")
    for parameters, several in groupby(sorted(rows), lambda key: key[0]):
        part = [rows[key] for key in several]
        median = {
            (store, name): statistics.median(row[store][name] for row in part)
            for store in ("directory", "bucket")
            for name in ("seconds", "bytes_down")
        }
        bytes_down = median["bucket", "bytes_down"]
        print(
            f"| {parameters:,} | {bytes_down / 1e6:,.0f} | {median['directory', 'seconds']:.2f} "
            f"| {median['bucket', 'seconds']:.2f} | {8e-6 * bytes_down / arguments.mbit_s:.2f} |"
        )


def _make_run(run: Path, model: Row) -> None:
    """A run of one replica, with snapshots of all fragments and one round after them."""
    replica = Replica(str(run), name="first", poll_seconds=0.002, snapshot_rounds=2, **model)
    while min(log.round for log in replica.exchange.state.fragments) < 3:
        replica.step()
        time.sleep(0.001)
    replica.engine.finish()  # a replica that takes round 3 uploads the snapshot of round 2
    deadline = time.monotonic() + 120
    while not all(log.snapshots for log in replica.exchange.state.fragments) or not any((run / "index").glob("*")):
        assert time.monotonic() < deadline, replica.exchange._seated.failure
        time.sleep(0.01)
    replica.exchange.leave()


def _join_both(server: Server, log: Path, model: Row, *, latency_ms: float, mbit_s: float = math.inf) -> Row:
    """Join a log in a directory, and the same in a bucket behind a network."""
    with tempfile.TemporaryDirectory() as folder:
        copy, url = Path(folder, "run"), server.new_url()
        with environment(server.environment):
            asyncio.run(_upload(log, url))
        shutil.copytree(log, copy)
        directory = _join(str(copy), model)
        link = network(server, latency_seconds=latency_ms / 1000, mbit_s=mbit_s)
        with link as variables, environment(variables):
            bucket = _join(url, model)
    newest = max((int(file.name) for file in (log / "index").glob("*")), default=1)
    return {
        "after_index": len(list((log / "log").iterdir())) - newest,
        "directory": directory,
        "bucket": bucket,
    }


def _join(url: str, model: Row) -> Row:
    """Join, take a step, and vanish."""
    start = time.perf_counter()
    replica = Replica(url, name="joiner", **model)
    replica.step()
    seconds = time.perf_counter() - start
    exchange = replica.exchange
    exchange.abort("it was measured")
    return {
        "seconds": seconds,
        "gets": exchange.store.requests["get"],
        "bytes_down": exchange.store.bytes_down,
        "replayed": exchange.num_replayed,
    }


async def _upload(folder: Path, url: str) -> None:
    """Copy the objects of a run into a bucket."""
    store, limit = Store.open(url), asyncio.Semaphore(32)

    async def put(file: Path) -> None:
        async with limit:
            await store.create(str(file.relative_to(folder)), file.read_bytes())

    await asyncio.gather(*(put(file) for file in folder.rglob("*") if file.is_file()))


def _rows(file: Path) -> dict[tuple[int, str], Row]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {(number, name): row for number, name, row in map(json.loads, lines)}


def _append(file: Path, key: tuple[int, str], row: Row) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps([*key, row]) + "\n")


def _whole(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


if __name__ == "__main__":
    main()
