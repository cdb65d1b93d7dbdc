"""The time from a send to its decision where replicas meet in a store, and its cost.

    python benchmarks/elastic_rounds.py time --output DIR
    python benchmarks/elastic_rounds.py bill --output DIR

`time`: three replicas, each a process with a network of its own (a proxy that adds latency to each request and
limits bandwidth each way) to one SeaweedFS on this machine. Inner steps sleep. τ is as many steps as the rule asks
for, 2 looks + 5 round trips + size / up + (M − 1) size / down, and H is 3 τ. For each payload: the time from the
call of `engine.step()` that sends it to that which knows the decision that counts it.

`bill`: eight replicas with P = 20 and H = 100, all times a tenth of those of a run with steps of 1 s: requests for
an outer step, and from these the dollars of a run of 10⁹ parameters.

Every measurement is written at once, to DIR/rounds.jsonl and DIR/bill.json; a later call measures what is missing.
"""

import argparse
import contextlib
import json
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from elastic_study.replica import Server, network, running_seaweedfs
from elastic_study.rounds_replica import live

from diloco.rendezvous.prices import PROVIDERS, Traffic
from diloco.wire import codec

NUM_REPLICAS, NUM_FRAGMENTS = 3, 2
POLL_SECONDS = 0.5
"""The default of a bucket, between two looks."""
STEP_SECONDS = 0.02
WIRE = "e3m0"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    time_of = commands.add_parser("time", help="from send to decided")
    time_of.add_argument("--output", type=Path, required=True)
    time_of.add_argument("--latencies", type=_numbers, default=[20.0, 100.0, 200.0], help="ms, round trip")
    time_of.add_argument("--bandwidths", type=_numbers, default=[10.0, 100.0, 1000.0], help="Mbit/s")
    time_of.add_argument("--elements", type=int, default=1_000_000, help="of a fragment")
    time_of.add_argument("--periods", type=int, default=25, help="of H steps")
    time_of.add_argument("--poll-seconds", type=float, default=POLL_SECONDS, help="between two looks")
    time_of.set_defaults(run=measure_times)
    bill = commands.add_parser("bill", help="requests, bytes and dollars")
    bill.add_argument("--output", type=Path, required=True)
    bill.add_argument("--replicas", type=int, default=8)
    bill.add_argument("--fragments", type=int, default=20)
    bill.add_argument("--sync-every", type=int, default=100)
    bill.add_argument("--step-seconds", type=float, default=0.1)
    bill.add_argument("--periods", type=int, default=3)
    bill.set_defaults(run=measure_bill)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


def measure_times(arguments: argparse.Namespace) -> None:
    """Measure each network that is missing in DIR/rounds.jsonl, and print the table."""
    file = arguments.output / "rounds.jsonl"
    rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["mbit_s"], row["latency_ms"]) for row in rows}
    missing = [(b, a) for b in arguments.bandwidths for a in arguments.latencies if (b, a) not in known]
    if missing:
        with tempfile.TemporaryDirectory() as folder, running_seaweedfs(Path(folder)) as server:
            for mbit_s, latency_ms in missing:
                rows.append(_times(server, mbit_s, latency_ms, arguments))
                with file.open("a") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
    print(
        "| Mbit/s | round trip ms | the rule s | send to decided s, p50 | p99 | last send to decided s, p50 | p99 "
        "| within the rule | contributors | requests per round | kB up | kB down |"
    )
    print("|---" * 12 + "|")
    for row in sorted(rows, key=lambda row: (row["mbit_s"], row["latency_ms"])):
        print(
            f"| {row['mbit_s']:g} | {row['latency_ms']:g} | {row['rule_seconds']:.2f} | {row['p50']:.2f} "
            f"| {row['p99']:.2f} | {row['all_p50']:.2f} | {row['all_p99']:.2f} | {row['within']:.0%} "
            f"| {row['contributors']:.2f} | {row['requests']:.1f} | {row['bytes_up'] / 1e3:,.0f} "
            f"| {row['bytes_down'] / 1e3:,.0f} |"
        )


def _times(server: Server, mbit_s: float, latency_ms: float, arguments: argparse.Namespace) -> Row:
    """Three replicas behind one kind of network."""
    elements, poll_seconds = arguments.elements, arguments.poll_seconds
    latency_seconds, num_bytes = latency_ms / 1000, codec(WIRE).payload_bytes(elements)
    transfer_seconds = NUM_REPLICAS * 8 * num_bytes / (mbit_s * 1e6)
    rule_seconds = 2 * poll_seconds + 5 * latency_seconds + transfer_seconds
    overlap_steps = math.ceil(rule_seconds / STEP_SECONDS)
    settings = {
        "url": server.new_url(),
        "elements": elements,
        "num_fragments": NUM_FRAGMENTS,
        "sync_every": 3 * overlap_steps,
        "overlap_steps": overlap_steps,
        "wire": WIRE,
        "num_replicas": NUM_REPLICAS,
        "poll_seconds": poll_seconds,
    }
    with contextlib.ExitStack() as stack:
        environments = [
            stack.enter_context(network(server, seed=m, latency_seconds=latency_seconds, mbit_s=mbit_s))
            for m in range(NUM_REPLICAS)
        ]
        answers = _replicas(settings, STEP_SECONDS, arguments.periods, environments)
    seconds, all_seconds, members = _delays(answers)
    return {
        "mbit_s": mbit_s,
        "latency_ms": latency_ms,
        "rule_seconds": rule_seconds,
        "payload_bytes": num_bytes,
        "samples": len(seconds),
        "p50": statistics.median(seconds),
        "p99": _percentile(seconds, 0.99),
        "all_p50": statistics.median(all_seconds),
        "all_p99": _percentile(all_seconds, 0.99),
        "within": sum(x <= rule_seconds for x in seconds) / len(seconds),
        "contributors": statistics.mean(members),
        **_a_round(answers),
    }


def _replicas(
    settings: Row, step_seconds: float, num_periods: int, environments: Sequence[dict[str, str]]
) -> list[Row]:
    """The answers of replicas that live in processes of their own."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["diloco.engine.streaming", "diloco.rendezvous.store_rendezvous"])
    with ProcessPoolExecutor(len(environments), mp_context=context) as processes:
        answers = [
            processes.submit(live, settings | {"name": f"r{m}"}, step_seconds, num_periods, variables)
            for m, variables in enumerate(environments)
        ]
        return [answer.result() for answer in answers]


def _delays(answers: Sequence[Row]) -> tuple[list[float], list[float], list[int]]:
    """Seconds from each counted send, and from its round's last, to the decision; contributors of each round."""
    own: dict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    members: dict[tuple[int, int], int] = {}
    for answer in answers:
        for decision in answer["decisions"]:
            p, at = decision["fragment"], decision["at"]
            sent = [send["at"] for send in answer["sends"] if send["fragment"] == p and send["at"] <= at]
            members[p, decision["round"]] = len(decision["members"])
            if decision["is_own"]:
                own[p, decision["round"]][answer["replica"]] = max(sent), at
    seconds = [at - sent for round_ in own.values() for sent, at in round_.values()]
    whole = [round_ for key, round_ in own.items() if len(round_) == members[key]]
    all_seconds = [at - max(sent for sent, _ in round_.values()) for round_ in whole for _, at in round_.values()]
    return seconds, all_seconds, list(members.values())


def _a_round(answers: Sequence[Row]) -> Row:
    """Requests and bytes of all replicas for one outer step."""
    outer_steps = statistics.mean(answer["used"]["outer_steps"] for answer in answers)
    names = ("creates", "gets", "bytes_up", "bytes_down")
    sums = {name: sum(answer["used"][name] for answer in answers) / outer_steps for name in names}
    return sums | {"requests": sums["creates"] + sums["gets"]}


def measure_bill(arguments: argparse.Namespace) -> None:
    """Count requests of a run with all times shortened alike, and print the bill of one with steps of 1 s."""
    file, scale = arguments.output / "bill.json", arguments.step_seconds
    num_replicas, num_fragments, sync_every = arguments.replicas, arguments.fragments, arguments.sync_every
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "url": f"{folder}/run",
                "elements": 1000,
                "num_fragments": num_fragments,
                "sync_every": sync_every,
                "overlap_steps": math.ceil(sync_every / num_fragments),
                "num_replicas": num_replicas,
                "poll_seconds": POLL_SECONDS * scale,
            }
            answers = _replicas(settings, scale, arguments.periods, [{}] * num_replicas)
        file.write_text(json.dumps(_a_round(answers)))
    used = json.loads(file.read_text())
    payload_bytes = codec(WIRE).payload_bytes(10**9 // num_fragments)
    num_rounds = num_fragments * 86400 / sync_every
    rows = {
        "creates": Traffic(creates=used["creates"] * num_rounds, gets=0, bytes_up=0, bytes_down=0),
        "reads": Traffic(creates=0, gets=used["gets"] * num_rounds, bytes_up=0, bytes_down=0),
        "egress": Traffic(
            creates=0,
            gets=0,
            bytes_up=num_replicas * payload_bytes * num_rounds,
            bytes_down=num_replicas * (num_replicas - 1) * payload_bytes * num_rounds,
        ),
    }
    print(f"M = {num_replicas}, P = {num_fragments}, H = {sync_every}, 10⁹ parameters, {WIRE}, steps of 1 s:")
    print(f"{used['creates']:.1f} creates and {used['gets']:.0f} reads an outer step, measured")
    print("| a day | |" + "".join(f" {prices.name} $ |" for prices in PROVIDERS))
    print("|---" * (2 + len(PROVIDERS)) + "|")
    for name, traffic in rows.items():
        amount = traffic.creates + traffic.gets
        quantity = f"{amount:,.0f}" if amount else f"{traffic.bytes_down / 1e12:.1f} TB"
        dollars = "".join(f" {traffic.dollars(prices):,.2f} |" for prices in PROVIDERS)
        print(f"| {name} | {quantity} |{dollars}")


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
