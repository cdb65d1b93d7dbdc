"""One replica of `fault_storm.py`: the trainer's own loop, in a process whose `engine.step()` is timed.

A line of its output is JSON, about four a second, and one at the end.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from diloco.engine.elastic import ElasticMembership
from diloco.engine.streaming import StreamingDiLoCo
from diloco.errors import UserError
from diloco.outer.step import OuterStep
from diloco.training.config.config import TrainConfig
from diloco.training.loop import train
from diloco.training.processes import end_with_parent
from diloco.training.records.metrics import StepMetrics
from diloco.training.records.runs import CONFIG_FILE

_ENGINE_STEP = StreamingDiLoCo.step


def replica(
    config: TrainConfig, out: Path, environment: Mapping[str, str], rest_seconds: float, slowness: float
) -> None:
    """Train until the run is over, from the last checkpoint if there is one.

    Args:
        config: resolved.
        out: the file of the lines, to which this process appends.
        environment: variables of the store.
        rest_seconds: sleep after each inner step: the processor is free, as if an accelerator computed.
        slowness: time of this replica's inner steps, relative to what they take.
    """
    end_with_parent()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with out.with_suffix(".log").open("a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    meter = Meter(out, rest_seconds, slowness)
    try:
        with mock.patch.object(StreamingDiLoCo, "step", lambda engine, **kwargs: meter.step(engine, **kwargs)):
            outcome = train(config, resume=(config.directory / CONFIG_FILE).exists(), on_step=meter.rest)
    except UserError as error:
        if "a run that has ended" not in str(error):
            raise
        meter.write(ended=True)
        return
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    assert outcome is not None, "the first process of a replica"
    meter.write(ended=True, loss=outcome.summary["eval_loss"])


class Meter:
    """The times of this process's steps, and the checksums of Θ after each outer step."""

    def __init__(self, out: Path, rest_seconds: float, slowness: float) -> None:
        self._out, self._rest_seconds, self._slowness = out, rest_seconds, slowness
        self._engine: StreamingDiLoCo | None = None
        self._rounds: list[int] = []
        self._outer: list[tuple[int, int, str]] = []  # fragment, round, checksum of Θ_p
        self._in_step_seconds = self._queued_seconds = 0.0
        self._longest_seconds = self._longest_own_seconds = 0.0
        self._stepped = self._written = time.perf_counter()

    def step(self, engine: StreamingDiLoCo, **measured: Any) -> tuple[OuterStep, ...]:
        """The engine's step, timed."""
        if self._engine is None:
            self._engine, self._stepped = engine, time.perf_counter()
        queued, start = _queued_seconds(), time.perf_counter()
        steps = _ENGINE_STEP(engine, **measured)
        seconds = time.perf_counter() - start
        queued_seconds = min(_queued_seconds() - queued, seconds)
        self._in_step_seconds += seconds
        self._queued_seconds += queued_seconds
        self._longest_seconds = max(self._longest_seconds, seconds)
        self._longest_own_seconds = max(self._longest_own_seconds, seconds - queued_seconds)
        self._note_outer()
        return steps

    def rest(self, _: StepMetrics) -> None:
        """Sleep after an inner step, and write a line if the last one is a quarter of a second old."""
        now = time.perf_counter()
        time.sleep(self._rest_seconds + (self._slowness - 1) * (now - self._stepped + self._rest_seconds))
        self._stepped = time.perf_counter()
        if self._stepped > self._written + 0.25:
            self.write()

    def write(self, *, ended: bool = False, loss: float | None = None) -> None:
        """Append a line."""
        line: dict[str, Any] = {"at": time.monotonic(), "ended": ended, "loss": loss}
        if self._engine is not None:
            self._note_outer()
            member = _membership(self._engine)
            line |= {
                "replica": member.replica.number,
                "steps": member.replica.num_steps,
                "sent_steps": sum(member.replica.last_sent),
                "counted_steps": sum(steps for _, steps in member.counted),
                "queued_seconds": _queued_seconds(),
                "in_step_seconds": self._in_step_seconds,
                "own_in_step_seconds": self._in_step_seconds - self._queued_seconds,
                "longest_seconds": self._longest_seconds,
                "longest_own_seconds": self._longest_own_seconds,
                "processor_seconds": time.process_time(),
                "outer": self._outer,
            }
        with self._out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        self._outer, self._written = [], time.perf_counter()

    def _note_outer(self) -> None:
        assert self._engine is not None, "it has taken a step"
        member = _membership(self._engine)
        if self._rounds != member.rounds:
            before = self._rounds or [-1] * len(member.rounds)
            for p, (old, new) in enumerate(zip(before, member.rounds, strict=True)):
                if old != new:
                    self._outer.append((p, new, f"{member.base(p):016x}"))
            self._rounds = list(member.rounds)


def _queued_seconds() -> float:
    """Time in which this thread was ready to run while other threads had the processors (Linux)."""
    return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def _membership(engine: StreamingDiLoCo) -> ElasticMembership:
    membership = engine._membership  # what the engine does not show: checksums, and steps of sends
    assert isinstance(membership, ElasticMembership), "all replicas here have a rendezvous"
    return membership
