"""One run in a storm of faults, and its row of the table."""

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.rendezvous.log.log import ENTRY, Log, first_entry
from diloco.rendezvous.replay import replayed
from diloco.rendezvous.store import Store
from diloco.training.config.config import TrainConfig
from diloco.training.records.finished import evaluate_run
from diloco.training.records.store_runs import initial_parameters
from storm_study.faults import VICTIMS, schedule
from storm_study.process import Replica

sys.path.append(str(Path(__file__).parents[2]))

from tests.fault_proxy import FaultProxy
from tests.servers import Server, running_seaweedfs

NETWORK = {"latency_seconds": 0.04, "lose_requests": 0.01, "lose_answers": 0.01}
EQUAL_SHARE = 0.9
"""The share of the token budget at which Θ of all runs is compared: every run has counted as many."""
Row = dict[str, Any]


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
        replicas = {"control": Replica(replace(alone, name="control"), self._folder, {}, rest, 1.0)}
        self._wait_for_all(replicas)
        for name, slowness in (("survivor", 1.0), ("slow", 2.0), ("third", 1.0)):
            replicas[name] = Replica(replace(config, name=name), self._folder, environment, rest, slowness)
        return replicas

    def _wait_for_all(self, replicas: dict[str, Replica]) -> float:
        """Wait until all train; the time."""
        deadline = time.monotonic() + 180
        for name, each in replicas.items():
            while not each.lines():
                if each.wait(0.1) and not each.lines():
                    raise SystemExit(
                        f"replica {name} has ended before its first step; if the others have spent the budget "
                        f"meanwhile, give more --steps or --rest-seconds:\n{each.log()}"
                    )
                if time.monotonic() > deadline:
                    raise SystemExit(f"replica {name} has not begun:\n{each.log()}")
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
                case "kill":
                    if not victim.wait(0):
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
        num_counted = replay.state.members[last["replica"]].steps
        if last["counted_steps"] != num_counted:
            raise SystemExit(
                f"the log counts {num_counted} steps of the survivor, which takes {last['counted_steps']}"
            )
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
            "steps_an_own_second": _rate(survivor, "steps", "at") / (1 - _rate(survivor, "queued_seconds", "at")),
            "control_steps_a_second": _rate(control, "steps", "at"),
            "processor_seconds_a_step": _rate(survivor, "processor_seconds", "steps"),
            "control_processor_seconds_a_step": _rate(control, "processor_seconds", "steps"),
            "longest_seconds": last["longest_seconds"],
            "longest_own_seconds": last["longest_own_seconds"],
            "control_longest_seconds": control[-1]["longest_seconds"],
            "control_longest_own_seconds": control[-1]["longest_own_seconds"],
            "share_in_step": _rate(survivor, "in_step_seconds", "at"),
            "own_share_in_step": _rate(survivor, "own_in_step_seconds", "at"),
            "control_share_in_step": _rate(control, "in_step_seconds", "at"),
            "control_own_share_in_step": _rate(control, "own_in_step_seconds", "at"),
            "steps": last["steps"],
            "steps_lost": last["sent_steps"] - num_counted,
            "rounds": replay.checked.rounds,
            "rounds_replayed": replay.checked.steps,
            "mean_last_contributors": statistics.mean(parts),
            "checksums": len(outers),
            "mismatches": sum(replay.checksum(p, round_) != outer for p, round_, outer in outers),
            "tokens": replay.state.tokens // len(replay.state.fragments),
            "loss": last["loss"],
            "loss_at_equal_tokens": _loss_at(mirror, self._config, EQUAL_SHARE * self._config.num_tokens),
        }


def _loss_at(mirror: Path, config: TrainConfig, num_tokens: float) -> float:
    """Held-out loss of Θ when the log had counted so many tokens; the entries after that are deleted."""
    number = asyncio.run(_num_entries(Store.open(str(mirror)), num_tokens))
    while (path := mirror / ENTRY.name(number)).exists():
        path.unlink()
        number += 1
    shutil.rmtree(mirror / "index", ignore_errors=True)
    return evaluate_run(str(mirror), prepared=config.data.prepared)["eval_loss"]


async def _num_entries(store: Store, num_tokens: float) -> int:
    """The number of entries before the one that counts more tokens than so many."""
    _, state = await first_entry(store)
    log = Log(store, state)
    async for number, _ in log.read():
        if log.state.tokens > num_tokens * len(log.state.fragments):
            return number
    return log.state.number


def _rate(lines: Sequence[dict[str, Any]], count: str, unit: str) -> float:
    """The growth of `count` while `unit` grows by 1, between the first and the last line."""
    return (lines[-1][count] - lines[0][count]) / (lines[-1][unit] - lines[0][unit])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
