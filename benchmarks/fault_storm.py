"""Three replicas on a real S3 server behind a bad network, while processes are killed and stopped.

    python benchmarks/fault_storm.py --seconds 300 --rates 0 60 1000 --out storm.jsonl

SeaweedFS runs on loopback behind a proxy that adds 40 ms to each request and loses 2 % of requests or answers. One
replica is left alone: the survivor. One trains at half speed; it and the third are killed (-9) and started again,
or stopped (SIGSTOP) for a while; sometimes the network is away for all. Every run's log and payloads are kept
aside and replayed in NumPy, and the replay is compared with the outer parameters of all replicas. A run whose line
is in the output is not repeated.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import obstore
import torch
import xxhash

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import fault_storm_replica as replica_script  # noqa: E402
from tests.fault_proxy import FaultProxy  # noqa: E402
from tests.rendezvous.replay import Replayed, replayed  # noqa: E402
from tests.servers import Server, running_seaweedfs  # noqa: E402

import diloco  # noqa: E402
from diloco.rendezvous.store_url import opened_url  # noqa: E402
from diloco.training.ancestor import end_with_parent  # noqa: E402

NETWORK = {"latency_seconds": 0.04, "lose_requests": 0.01, "lose_answers": 0.01}
KINDS = {"kill": 0.45, "stop": 0.5, "outage": 0.05}
"""How often each kind of fault is drawn."""
COMMAND = f"{sys.executable} {HERE / 'fault_storm_replica.py'} --url {{url}} --name {{name}} --out {{out}}"
COMMAND += " --step-seconds {step_seconds} {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 60, 1000], help="faults an hour")
    parser.add_argument("--seconds", type=float, default=300, help="of each run, after all have joined")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the faults")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="least time of an inner step")
    parser.add_argument("--outage-seconds", type=float, default=20)
    parser.add_argument("--text", type=Path, help="training text, plain or JSON lines; without it, synthetic")
    parser.add_argument("--replica", default=COMMAND, help="command of a replica, with {url} {name} {out} …")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a run")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(line["rate"], line["seed"], line["asked_seconds"]) for line in lines}
    with tempfile.TemporaryDirectory() as folder, running_seaweedfs(Path(folder)) as server:
        os.environ |= server.environment
        for seed in arguments.seeds:
            for rate in arguments.rates:
                if (rate, seed, arguments.seconds) in done:
                    continue
                with tempfile.TemporaryDirectory() as place:
                    line = Storm(server, Path(place), rate, seed, arguments).run()
                with arguments.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                lines.append(line)
    show(lines)


@dataclass
class Process:
    """One name, and the processes that have had it."""

    name: str
    command: list[str]
    out: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            self.command,
            env=environment,
            stderr=self.out.with_suffix(".log").open("ab"),
            preexec_fn=end_with_parent,
        )

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []


class Storm:
    """One run."""

    def __init__(self, server: Server, place: Path, rate: float, seed: int, arguments: argparse.Namespace) -> None:
        self.server, self.place, self.rate, self.seed, self.arguments = server, place, rate, seed, arguments
        self.random, self.counts, self.ended = random.Random(seed), Counter[str](), threading.Event()
        self.url = server.new_url()
        text = f"--text {arguments.text.absolute()}" if arguments.text else ""
        self.replicas = []
        for name, slowness in (("survivor", 1), ("slow", 2), ("third", 1)):
            command = arguments.replica.format(
                url=self.url,
                name=name,
                out=place / f"{name}.jsonl",
                text=text,
                step_seconds=slowness * arguments.step_seconds,
            )
            self.replicas.append(Process(name, shlex.split(command), place / f"{name}.jsonl"))

    def run(self) -> dict:
        """Start, disturb, end and replay; the line of the output."""
        archive = threading.Thread(target=self._archive)
        archive.start()
        try:
            with FaultProxy(self.server.port, seed=self.seed) as proxy:
                proxy.set(**NETWORK)
                self.environment = os.environ | self.server.through(proxy.url)
                for replica in self.replicas:
                    replica.start(self.environment)
                    self._wait(lambda r=replica: r.lines(), 120)
                before = [replica.lines()[-1] for replica in self.replicas]
                self._disturb(proxy, time.monotonic() + self.arguments.seconds)
                after = [replica.lines()[-1] for replica in self.replicas]
                self._end()
        finally:
            for replica in self.replicas:
                replica.send(signal.SIGKILL)
            self.ended.set()
            archive.join()
        return self._line(before, after)

    def _disturb(self, proxy: FaultProxy, deadline: float) -> None:
        timers: list[threading.Timer] = []
        outage_until = 0.0
        while True:
            pause = self.random.expovariate(self.rate / 3600) if self.rate else float("inf")
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                break
            kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
            victim = self.random.choice(self.replicas[1:])
            if kind == "outage":
                if time.monotonic() < outage_until:
                    continue
                seconds = min(self.arguments.outage_seconds, deadline - time.monotonic())
                outage_until = time.monotonic() + seconds
                proxy.set(outage=True)
                timers.append(threading.Timer(seconds, lambda: proxy.set(**NETWORK)))
            elif kind == "kill":
                victim.send(signal.SIGKILL)
                assert victim.process is not None
                victim.process.wait()
                victim.start(self.environment)
            else:
                seconds = self.random.uniform(1, 20)
                victim.send(signal.SIGSTOP)
                timers.append(threading.Timer(seconds, victim.send, (signal.SIGCONT,)))
            self.counts[kind] += 1
            if kind != "kill":
                timers[-1].start()
        for timer in timers:
            timer.cancel()
        proxy.set(**NETWORK)
        for replica in self.replicas:
            replica.send(signal.SIGCONT)

    def _end(self) -> None:
        """Let all finish, the survivor last."""
        for replica in reversed(self.replicas):
            replica.send(signal.SIGTERM)
        for replica in self.replicas:
            assert replica.process is not None
            replica.process.wait(180)

    def _archive(self) -> None:
        """Keep the log and the payloads aside, before the replicas delete what they don't need any more."""
        client = opened_url(self.url)[1]
        while True:
            is_last = self.ended.is_set()
            for prefix in ("payloads", "log"):
                for chunk in obstore.list(client, prefix):
                    for meta in chunk:
                        path = self.place / "run" / meta["path"]
                        if path.exists():
                            continue
                        try:
                            data = bytes(obstore.get(client, meta["path"]).bytes())
                        except FileNotFoundError:
                            continue  # deleted meanwhile
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(data)
            if is_last:
                return
            self.ended.wait(3)

    def _wait(self, condition, seconds: float) -> None:  # noqa: ANN001
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError((self.place / "survivor.log").read_text()[-2000:])
            time.sleep(0.2)

    def _line(self, before: Sequence[dict], after: Sequence[dict]) -> dict:
        model = replica_script.new_model()
        fragments = diloco.strided(model, layers_per_fragment=1)
        theta0 = [
            torch.cat([model.get_parameter(name).detach().reshape(-1) for name in fragment.parameters]).numpy()
            for fragment in fragments
        ]
        run = replayed(self.place / "run", theta0, wire="e3m0")
        lines = {replica.name: replica.lines() for replica in self.replicas}
        survivor = lines["survivor"][-1]
        told = [0] * len(fragments)
        for c in run.contributions:
            if c["replica"] == survivor["replica"]:
                told[c["fragment"]] += c["steps"]
        kinds = Counter(entry["kind"] for entry in run.entries)
        return {
            "rate": self.rate,
            "seed": self.seed,
            "asked_seconds": self.arguments.seconds,
            "faults": dict(self.counts),
            "survivor_steps_a_second": (after[0]["steps"] - before[0]["steps"])
            / (after[0]["seconds"] - before[0]["seconds"]),
            "longest_step_seconds": max(line["longest_seconds"] for name in lines for line in lines[name][-1:]),
            "survivor_longest_seconds": survivor["longest_seconds"],
            "survivor_share_in_step": survivor["in_step_seconds"] / survivor["seconds"],
            "survivor_steps_lost": max(steps - t for steps, t in zip(survivor["told_steps"], told, strict=True)),
            "survivor_steps_untold": survivor["steps"] - min(told),
            "ended_well": [lines[name][-1]["end"] for name in lines],
            "mismatches": mismatches(run, lines),
            "compared": sum(len(lines[name]) for name in lines),
            "entries": dict(kinds),
            "tokens": sum(c["tokens"] for c in run.contributions) // len(fragments),
            "losses": losses(run, model, fragments, self.arguments.text),
        }


def mismatches(run: Replayed, lines: dict[str, list[dict]]) -> int:
    """How many outer parameters that replicas have reported are not those of the replay."""
    hashes = [[f"{xxhash.xxh3_64_intdigest(outer.tobytes()):016x}" for outer in outers] for outers in run.outer]
    return sum(
        hashes[p][number] != line["outer"][p]
        for name in lines
        for line in lines[name]
        for p, number in enumerate(line["rounds"])
    )


def losses(run: Replayed, model, fragments, text: Path | None) -> list[list[float]]:  # noqa: ANN001
    """Counted tokens and held-out loss of Θ, at ten points of the log."""
    total = sum(c["tokens"] for c in run.contributions)
    points, rounds, tokens = [], [0] * len(fragments), 0
    for entry in run.entries:
        if entry["kind"] != "outer":
            continue
        rounds[entry["body"]["fragment"]] += 1
        tokens += sum(c["tokens"] for c in entry["body"]["contributions"])
        if tokens < total * (len(points) + 1) / 10:
            continue
        for p, fragment in enumerate(fragments):
            named = {name: model.get_parameter(name) for name in fragment.parameters}
            parts = np.split(run.outer[p][rounds[p]], np.cumsum([x.numel() for x in named.values()])[:-1])
            with torch.no_grad():
                for parameter, part in zip(named.values(), parts, strict=True):
                    parameter.copy_(torch.from_numpy(part).view_as(parameter))
        points.append([tokens // len(fragments), replica_script.held_out_loss(model, text)])
    return points


def show(lines: Sequence[dict]) -> None:
    """A table, a row a run."""
    base = {line["seed"]: line["survivor_steps_a_second"] for line in lines if not line["rate"]}
    common = min(line["tokens"] for line in lines)
    for line in lines:
        points = np.array(line["losses"])
        loss = float(np.interp(common, points[:, 0], points[:, 1]))
        print(
            f"{line['rate']:6.0f} faults/h {line['faults']}: goodput "
            f"{line['survivor_steps_a_second'] / base.get(line['seed'], float('nan')):.2%}, longest pause "
            f"{1e3 * line['survivor_longest_seconds']:.0f} ms (all {1e3 * line['longest_step_seconds']:.0f} ms), "
            f"in step() {line['survivor_share_in_step']:.3%}, steps lost {line['survivor_steps_lost']}, "
            f"mismatches {line['mismatches']} of {line['compared']}, loss {loss:.4f} at {common:,} tokens"
        )


if __name__ == "__main__":
    main()
