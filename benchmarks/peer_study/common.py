"""Parts of the replicas of all systems: settings, model, inner step, and a diary that survives `kill -9`.

It needs nothing but torch, since a peer may run in an environment of its own.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ALPHA = 0.5
"""α of the merge θ ← α θ + (1 − α) Θ."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """The settings of one replica."""

    name: str
    diary: str
    """The file that it writes."""
    url: str
    """The store, or torchft's lighthouse."""
    num_replicas: int
    """Number of replicas at the start."""
    sync_every: int
    """H."""
    num_fragments: int
    """P."""
    overlap_steps: int
    """τ, where a system has one."""
    step_seconds: float
    """Sleep in each inner step."""
    width: int
    """Width of the model: P square layers, one a fragment."""
    options: dict[str, Any]
    """Further settings of the system."""


def settings_of_arguments() -> ReplicaSettings:
    """The settings on this process's command line, as JSON."""
    return ReplicaSettings(**json.loads(sys.argv[1]))


class Diary:
    """A file with a JSON line for each event; `at` is the monotonic clock, which all processes share.

    Once there is a file of its name with `.die` after it, the replica kills itself when it next sends: on a slow
    link replicas send most of the time.
    """

    def __init__(self, path: str) -> None:
        self._die = Path(f"{path}.die")
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115, it stays open until the process is killed
        self._lock = threading.Lock()

    def note(self, event: str, **values: Any) -> None:
        """Write an event."""
        with self._lock:
            self._file.write(json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n")

    def sending(self) -> None:
        """Note that an outer gradient is about to be sent, or die of it."""
        if self._die.exists():
            self.note("death")
            os.kill(os.getpid(), signal.SIGKILL)


class Training:
    """The model and its inner steps: one batch of noise, AdamW, and a sleep in the place of a larger model.

    The diary's `start` is when all is imported and built, and no other replica was looked for yet.

    Args:
        settings: the replica's.
        diary: where each step is written.
        traffic: bytes sent and received so far.
    """

    def __init__(self, settings: ReplicaSettings, diary: Diary, traffic: Callable[[], tuple[int, int]]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = nn.Module()
        layers = [nn.Linear(settings.width, settings.width) for _ in range(settings.num_fragments)]
        self.model.blocks = nn.ModuleList(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.num_steps = 0
        self._layers, self._diary, self._traffic = layers, diary, traffic
        self._sleep_seconds, self._width = settings.step_seconds, settings.width
        self._generator = torch.Generator().manual_seed(sum(settings.name.encode()))
        diary.note("start")

    def inner_step(self) -> None:
        """One inner step; the time from one to the next is a step's, exchange included."""
        sent, received = self._traffic()
        self._diary.note("step", step=self.num_steps, sent=sent, received=received)
        x_BxD = torch.randn(8, self._width, generator=self._generator)
        hidden_BxD = x_BxD
        for layer in self._layers:
            hidden_BxD = hidden_BxD + torch.tanh(layer(hidden_BxD))
        loss = (hidden_BxD - x_BxD.roll(1, dims=1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        time.sleep(self._sleep_seconds)
        self.num_steps += 1
        self.optimizer.step()

    def outer_step(self, fragment: int, *, lost_steps: float, counted: bool) -> None:
        """Note an outer step that this replica took, or an attempt that failed."""
        self._diary.note("merge", fragment=fragment, lost_steps=lost_steps, counted=counted)
