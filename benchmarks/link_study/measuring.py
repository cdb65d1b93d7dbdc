"""The replicas of `links.py` in their namespaces: start them, ask them, and make rows of their answers.

Shapes: S steps, M replicas.
"""

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from network.laboratory import Laboratory

from diloco.training.config.config import TrainConfig, to_json

from .methods import NUM_REPLICAS, PEER, all_reduce_seconds, num_steps
from .rows import Row

PAYLOAD_BYTES = 32_000_000
_REPLICA = Path(__file__).parents[1] / "links_replica.py"
_ROUNDS = count(100_000)


@contextmanager
def replica_processes(laboratory: Laboratory, config: TrainConfig) -> "Iterator[list[subprocess.Popen[str]]]":
    """The replicas' processes, each in its namespace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(to_json(config)))
        laboratory.set_links(gbit_s=1.0)
        yield [
            laboratory.start(
                replica,
                [sys.executable, str(_REPLICA), str(file)],
                environment={
                    "RANK": str(replica),
                    "WORLD_SIZE": str(NUM_REPLICAS),
                    "LOCAL_RANK": "0",
                    "MASTER_ADDR": laboratory.address(0),
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


def ask(replicas: "Sequence[subprocess.Popen[str]]", question: dict[str, Any]) -> list[dict[str, Any]]:
    """Each replica's answer to one question."""
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


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Everything that the measurements at one bandwidth have in common."""

    laboratory: Laboratory
    replicas: "Sequence[subprocess.Popen[str]]"
    config: TrainConfig
    latency_seconds: float
    """One-way latency; needs an emulator."""
    loss: float
    """Fraction of packets lost; needs an emulator."""
    seconds: float
    """Approximate length of a run of Data-Parallel."""
    evaluated_mbit_s: float
    """The bandwidth at which held-out losses are taken."""

    def rows(self, missing: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray | None]]:
        """A row for each method at one bandwidth, and steps without exchange before and after it, (S, M)."""
        mbit_s = missing[0]["mbit_s"]
        self.laboratory.set_links(gbit_s=mbit_s / 1000, latency_seconds=self.latency_seconds, loss=self.loss)
        link = means(ask(self.replicas, {"measure": "link", "seconds": min(2.0, self.seconds)}))
        before = None
        for row in missing:
            name, _, option = row["method"].partition(":")
            if name == "payload":
                question = {"measure": name, "num_bytes": PAYLOAD_BYTES, "round": next(_ROUNDS)}
                yield row | link | means(ask(self.replicas, question)), None
            elif name == "all_reduce":
                rounds = max(2, round(self.seconds / 2 / all_reduce_seconds(self.config, link["link_gbit_s"])))
                question = {"measure": name, "wire": option, "num_rounds": rounds}
                yield row | link | means(ask(self.replicas, question)), None
            else:
                before = before or self._alone()
                measured = self._trained(row, link["link_gbit_s"])
                after = self._alone()
                steps = [[np.diff(answer["ends"], prepend=0.0) for answer in run] for run in (before, after)]
                idle_seconds = statistics.mean(answer["after_seconds"] for answer in before + after)
                alone_SxM = np.vstack([np.stack(run, axis=1) for run in steps])
                yield row | link | measured | {"alone_after_seconds": idle_seconds}, alone_SxM
                before = after

    def _alone(self) -> list[dict[str, Any]]:
        return ask(self.replicas, {"method": "alone", "num_steps": self.config.diloco.sync_every})

    def _trained(self, row: Row, link_gbit_s: float) -> dict[str, Any]:
        """The columns of one method's run."""
        method, mbit_s = row["method"], row["mbit_s"]
        warm, measured = num_steps(method, self.config, link_gbit_s, self.seconds)
        evaluated = row["repeat"] == 0 and mbit_s == self.evaluated_mbit_s
        question: dict[str, Any] = {"method": method, "num_steps": warm + measured}
        question["evaluate"] = evaluated and warm + measured == self.config.num_steps
        with _lighthouse(self.laboratory) if method == PEER else nullcontext("") as question["lighthouse"]:
            answers = ask(self.replicas, question)
        if len({answer["outer_hash"] for answer in answers}) > 1:
            raise RuntimeError(f"after {method} the replicas have different outer parameters")
        wall_seconds = statistics.mean(answer["ends"][-1] - answer["ends"][warm - 1] for answer in answers)
        print(f"{mbit_s:g} Mbit/s  {method}  {wall_seconds / measured:.4f} s a step", flush=True)
        numbers = [{k: v for k, v in answer.items() if k not in ("ends", "outer_hash")} for answer in answers]
        return means(numbers) | {
            "warm_steps": warm,
            "measured_steps": measured,
            "wall_seconds": wall_seconds,
            "outer_hash": answers[0]["outer_hash"][:16],
        }


@contextmanager
def _lighthouse(laboratory: Laboratory) -> Iterator[str]:
    """The address of torchft's lighthouse: a new one a run, since it waits for the last run's managers."""
    timeouts = ["--join_timeout_ms", "600000", "--heartbeat_timeout_ms", "3600000"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{laboratory.address(0)}:{free.getsockname()[1]}"
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    process = laboratory.start(
        0,
        [program, "--bind", address, "--min_replicas", str(NUM_REPLICAS), *timeouts],
        environment={"RUST_LOG": "error"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(1.0)
    try:
        yield f"http://{address}"
    finally:
        process.kill()


def means(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each number over the replicas."""
    return {name: statistics.mean(answer[name] for answer in answers) for name in answers[0]}
