"""The fleet simulator beside real storms of faults: goodput, and the time from a send to its decision.

    python benchmarks/fleet_storm.py --output DIR

Three replicas, each a process with a network of its own (a proxy that adds 40 ms to each request, loses 1 % of
requests and answers, and limits bandwidth), meet in one SeaweedFS. Inner steps sleep 0.2 s, those of `slow` 0.4 s.
`slow` and `third` are killed and started again at once, without a checkpoint, or stopped for 1 to 20 s; for 20 s
at a time nobody reaches the store. H = 30, τ = 10, P = 3, E3M0.

Goodput is the steps that the log counts over those that three machines could have taken at the survivor's pace.
The simulator gets this pace, the links, and of the storm the kills, the time until each victim took steps again,
and the time stopped.
DIR/fleet_storm.csv has a row per storm; one that is in it is not repeated.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from elastic_study.replica import FaultProxy, Replica, running_seaweedfs
from storm_study.described import Suffered, described
from storm_study.faults import VICTIMS, schedule

from diloco.simulator.churn import in_store
from diloco.simulator.fleet import FleetRun, Machines, Outcome
from diloco.training.processes import end_with_parent
from diloco.wire import codec

STEP_SECONDS = {"survivor": 0.2, "slow": 0.4, "third": 0.2}
STEP_TOKENS = 1024
NETWORK = {"latency_seconds": 0.04, "lose_requests": 0.01, "lose_answers": 0.01}
MBIT_S = 20.0
OUTAGE_SECONDS = 20.0
ELEMENTS = 400_000
SETTINGS = {"num_fragments": 3, "sync_every": 30, "overlap_steps": 10}
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--faults-an-hour", type=float, nargs="+", default=[0, 120, 600])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "fleet_storm.csv"
    rows: list[Line] = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    known = {float(row["faults_an_hour"]) for row in rows}
    for faults in arguments.faults_an_hour:
        if faults in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(Storm(faults, arguments.seed, arguments.seconds, Path(folder)).row())
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[-1])
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        outcomes = simulate(row)
        goodput = statistics.mean(outcome.goodput for outcome in outcomes)
        p50 = statistics.mean(outcome.decided_seconds[0] for outcome in outcomes)
        print(
            f"{float(row['faults_an_hour']):5,.0f} faults/h: goodput {float(row['goodput']):.1%} (simulated "
            f"{goodput:.1%}), send to decided {float(row['decided_p50']):.2f} s (simulated {p50:.2f} s)"
        )


def simulate(row: Mapping[str, Any], *, num_seeds: int = 24) -> list[Outcome]:
    """Simulated outcomes of the storm of a row, by seed; goodput is relative to the pace without faults."""
    seconds, slowness = float(row["seconds"]), float(row["slowness"])
    suffered = {
        victim: Suffered(
            kills=int(row[f"{victim}_kills"]),
            down_seconds=float(row[f"{victim}_down_seconds"]),
            stopped_seconds=float(row[f"{victim}_stopped_seconds"]),
        )
        for victim in VICTIMS
    }
    network: Line = {"count": 1, "up_mbit_s": MBIT_S, "down_mbit_s": MBIT_S, "latency_seconds": 0.02}
    quiet = FleetRun(
        machines=tuple(
            Machines(name=name, step_seconds=step * slowness, **network) for name, step in STEP_SECONDS.items()
        ),
        num_params=3 * ELEMENTS,
        step_tokens=STEP_TOKENS,
        bits_per_value=8 * codec("e3m0").payload_bytes(ELEMENTS) / ELEMENTS,
        checkpoint_seconds=1e9,
        **SETTINGS,
    )
    run = described(quiet, suffered, seconds=seconds)
    outcomes = [in_store(run, num_outer_steps=int(row["outer_steps"]), seed=seed) for seed in range(num_seeds)]
    possible = 3600 * quiet.ideal_tokens_per_second
    return [replace(outcome, goodput=outcome.tokens_per_hour / possible) for outcome in outcomes]


class Storm:
    """A storm over three processes."""

    def __init__(self, faults_an_hour: float, seed: int, seconds: float, folder: Path) -> None:
        self._faults_an_hour, self._seed, self._seconds, self._folder = faults_an_hour, seed, seconds, folder
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["diloco.engine.streaming", "diloco.rendezvous.store_rendezvous"])
        self._processes: dict[str, BaseProcess] = {}
        self._variables: dict[str, dict[str, str]] = {}
        self._kills = {victim: list[float]() for victim in VICTIMS}
        self._stops = {victim: list[tuple[float, float]]() for victim in VICTIMS}

    def row(self) -> Line:
        """Live through the storm; what was measured."""
        with ExitStack() as stack:
            server = stack.enter_context(running_seaweedfs(self._made("server")))
            proxies = {
                name: stack.enter_context(FaultProxy(server.port, seed=self._seed)) for name in STEP_SECONDS
            }
            self._set(proxies)
            self._settings = {"url": server.new_url(), "elements": ELEMENTS, "num_replicas": 3, **SETTINGS}
            self._variables = {name: server.through(proxy.url) for name, proxy in proxies.items()}
            for name in STEP_SECONDS:
                self._start(name)
                stack.callback(lambda name=name: self._processes[name].kill())
            while not all(any("step" in line for line in self._lines(name)) for name in STEP_SECONDS):
                time.sleep(0.1)
            begin = time.monotonic()
            self._disturb(proxies, begin)
            end = time.monotonic()
        return self._measured(begin, end)

    def _made(self, name: str) -> Path:
        (self._folder / name).mkdir()
        return self._folder / name

    def _set(self, proxies: Mapping[str, FaultProxy]) -> None:
        for proxy in proxies.values():
            proxy.set(**NETWORK, bytes_s=MBIT_S * 1e6 / 8)

    def _start(self, name: str) -> None:
        arguments = (self._settings | {"name": name}, STEP_SECONDS[name], self._variables[name], self._path(name))
        self._processes[name] = self._context.Process(target=live, args=arguments, daemon=True)
        self._processes[name].start()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _lines(self, name: str) -> Iterator[Line]:
        path = self._path(name)
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.endswith("}"):
                yield json.loads(line)

    def _disturb(self, proxies: Mapping[str, FaultProxy], begin: float) -> None:
        """Do the faults at their times."""
        faults = schedule(self._faults_an_hour, self._seed, OUTAGE_SECONDS)
        fault, away_until = next(faults, None), 0.0
        stopped_until = dict.fromkeys(STEP_SECONDS, 0.0)
        while (now := time.monotonic()) < begin + self._seconds:
            time.sleep(0.02)
            if away_until and now > away_until:
                self._set(proxies)
                away_until = 0.0
            for victim, until in stopped_until.items():
                if until and now > until:
                    self._go_on(victim, now)
                    stopped_until[victim] = 0.0
            if fault is None or now < begin + fault.at_seconds:
                continue
            match fault.kind:
                case "outage":
                    for proxy in proxies.values():
                        proxy.set(outage=True)
                    away_until = now + fault.seconds
                case "stop":
                    if not stopped_until[fault.victim]:
                        self._signal(fault.victim, signal.SIGSTOP)
                        self._stops[fault.victim].append((now, now + self._seconds))
                    stopped_until[fault.victim] = max(stopped_until[fault.victim], now + fault.seconds)
                case "kill":
                    if stopped_until[fault.victim]:
                        self._stops[fault.victim][-1] = self._stops[fault.victim][-1][0], now
                        stopped_until[fault.victim] = 0.0
                    self._processes[fault.victim].kill()
                    self._processes[fault.victim].join()
                    self._kills[fault.victim].append(now)
                    self._start(fault.victim)
            fault = next(faults, None)
        for victim, until in stopped_until.items():
            if until:
                self._go_on(victim, time.monotonic())

    def _go_on(self, victim: str, now: float) -> None:
        self._signal(victim, signal.SIGCONT)
        self._stops[victim][-1] = self._stops[victim][-1][0], now

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._processes[name].pid
        assert pid is not None, "it was started"
        os.kill(pid, number)

    def _measured(self, begin: float, end: float) -> Line:
        survivor = [line for line in self._lines("survivor") if "step" in line]
        counted = survivor[-1]["tokens"] - max(line["tokens"] for line in survivor if line["at"] <= begin)
        num_steps = sum(line["at"] > begin for line in survivor)
        slowness = (survivor[-1]["at"] - begin) / num_steps / STEP_SECONDS["survivor"]
        possible = (end - begin) * sum(1 / step for step in STEP_SECONDS.values()) / slowness
        delays, members = list[float](), dict[tuple[int, int], int]()
        for name in STEP_SECONDS:
            sent: dict[int, float] = {}
            for line in self._lines(name):
                if "send" in line:
                    sent[line["send"]] = line["at"]
                elif "round" in line:
                    members[line["fragment"], line["round"]] = line["members"]
                    if line["is_own"] and line["fragment"] in sent:
                        delays.append(line["at"] - sent.pop(line["fragment"]))
                elif "start" in line:
                    sent.clear()
        row: Line = {"faults_an_hour": self._faults_an_hour, "seconds": end - begin, "slowness": slowness}
        for victim in VICTIMS:
            row[f"{victim}_kills"] = len(self._kills[victim])
            row[f"{victim}_down_seconds"] = self._down_seconds(victim, end)
            row[f"{victim}_stopped_seconds"] = sum(until - since for since, until in self._stops[victim])
        return row | {
            "outer_steps": len(members),
            "goodput": counted / SETTINGS["num_fragments"] / STEP_TOKENS / possible,
            "contributors": statistics.mean(members.values()),
            "decided_p50": statistics.median(delays),
            "samples": len(delays),
        }

    def _down_seconds(self, victim: str, end: float) -> float:
        """The time from each kill to the next inner step, a stop in it taken out."""
        steps = [line["at"] for line in self._lines(victim) if "step" in line]
        down = 0.0
        kills = self._kills[victim]
        for at, next_kill in zip(kills, (*kills[1:], end), strict=False):
            up = min((step for step in steps if step > at), default=end)
            stopped = sum(max(0.0, min(up, until) - max(at, since)) for since, until in self._stops[victim])
            down += min(up, next_kill) - at - stopped
        return down


def live(settings: Line, step_seconds: float, variables: Mapping[str, str], path: Path) -> None:
    """Take inner steps without end, and write down each step, send and decision."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(variables)
    with path.open("a", buffering=1) as file:

        def note(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")

        note(start=True, at=time.monotonic())
        replica = Replica(**settings)
        exchange, next_at = replica.exchange, time.monotonic()
        while True:
            next_at += step_seconds
            time.sleep(max(0.0, next_at - time.monotonic()))
            next_at = max(next_at, time.monotonic() - step_seconds)  # after a stop it makes up for nothing
            replica.step(STEP_TOKENS)
            note(step=True, at=time.monotonic(), tokens=exchange.state.tokens)
            for send in exchange.sends:
                note(send=send["fragment"], at=send["at"])
            for decision in exchange.decisions:
                note(**{**decision, "members": len(decision["members"])})
            exchange.sends.clear()
            exchange.decisions.clear()


if __name__ == "__main__":
    main()
