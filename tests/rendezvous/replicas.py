"""Replicas that meet in a directory: the smallest training loop, and one that a plan disturbs.

Legend: P fragments, H sync period, θ a replica's parameters, Θ the outer parameters.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tests.engine.cases import SIZES, inner_step, theta_of
from torch import nn

import diloco
from diloco.errors import DilocoError
from diloco.outer.rule import OuterRule

H, P = 6, 3
CUTS = np.cumsum([size + 1 for size in SIZES[:P]])[:-1]


def new_model() -> nn.Module:
    """The same on every replica, though several may be built at once: torch has one generator for all threads."""
    with _GENERATOR:
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(size, 1) for size in SIZES[:P])
    return model


_GENERATOR = threading.Lock()


def theta0() -> list[np.ndarray]:
    """The initial Θ, by fragment."""
    return np.split(theta_of(new_model()), CUTS)


class Replica:
    """A replica of a run in a directory, which it joins."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "a",
        sync_every: int = H,
        overlap_steps: int = 1,
        error_feedback: float | None = None,
        wire: str = "fp32",
        combine: str = "gather",
        model: nn.Module | None = None,
        outer: str | OuterRule | None = None,
        mixing: str | float = 0.5,
        first_target: int = 0,
        **exchange,
    ) -> None:
        self.model, self.first_target = new_model() if model is None else model, first_target
        # 300 of these steps, the default, are one second without a store.
        settings = {"poll_seconds": 0.01, "timeout_seconds": 20.0, "max_local_steps": 100_000} | exchange
        self.exchange = diloco.StoreRendezvous(url, name=name, **settings)
        pace = self.exchange._pace
        # The last payloads of one that finishes before the others are decided without them, after 2 s by default.
        self.exchange._pace = lambda sync_every: replace(pace(sync_every), drain_seconds=0.4)
        self.engine = diloco.StreamingDiLoCo(
            self.model,
            fragments=diloco.sequential(self.model, layers_per_fragment=1),
            schedule=diloco.Schedule(sync_every=sync_every, num_fragments=P, overlap_steps=overlap_steps),
            wire=wire,
            combine=combine,
            error_feedback=error_feedback,
            outer=outer,
            mixing=mixing,
            rendezvous=self.exchange,
        )
        self.rounds = [log.round for log in self.exchange.state.fragments]
        """The round of each fragment of the Θ that `outer()` gives."""
        self.progress = [np.zeros(len(theta_p)) for theta_p in theta0()]
        """The sum of the changes that inner steps made to θ, by fragment."""

    def step(
        self, *, tokens: int = 8, loss: float | torch.Tensor | None = None, pause_seconds: float = 0.0
    ) -> tuple[diloco.OuterStep, ...]:
        """One inner step towards a target of this replica's own, and the engine's."""
        before = self.theta()
        inner_step(self.model, self.first_target + self.exchange.replica, self.engine.num_steps + 1)
        for progress, old, new in zip(self.progress, before, self.theta(), strict=True):
            progress += new.astype(np.float64) - old
        time.sleep(pause_seconds)
        return self.seen(self.engine.step(tokens=tokens, loss=loss))

    def seen(self, outer_steps: tuple[diloco.OuterStep, ...]) -> tuple[diloco.OuterStep, ...]:
        """Note the rounds that were taken."""
        for outer_step in outer_steps:
            self.rounds[outer_step.sync.fragment] = outer_step.sync.round
        return outer_steps

    def theta(self) -> list[np.ndarray]:
        """θ by fragment, copied."""
        return np.split(theta_of(self.model), CUTS)

    def outer(self) -> list[np.ndarray]:
        """Θ by fragment, copied."""
        parameters = self.engine.outer_parameters().values()
        return np.split(torch.cat([p.reshape(-1) for p in parameters]).numpy(), CUTS)

    def finish(self) -> None:
        """The end of a loop: finish and leave."""
        self.seen(self.engine.finish())
        self.exchange.leave()

    def vanish(self) -> None:
        """End as a killed process does: nothing more is said."""
        self.exchange.abort("the test has ended it")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The life of one replica process."""

    name: str
    num_steps: int = 90
    step_seconds: float = 0.004
    tokens: int = 8
    """In each step."""
    from_entry: int = 0
    """The number of the entry with which it starts, once the log has it."""
    kill_at: int = 0
    """The step from which on it kills itself with SIGKILL, once the log has counted it; 0 for never."""
    stops: tuple[str, int] | None = None
    """The replica that it stops (SIGSTOP) after a step, and that step; it goes on when `lively` were counted."""
    lively: tuple[str, ...] = ()
    """The replicas, itself among them, that outer entries must count while the other one is stopped."""
    clock_hours: float = 0.0
    """The error of the process's clock."""
    settings: dict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a replica."""

    replica: int
    num_steps: int
    rounds: list[int]
    outer: list[np.ndarray]
    sent_steps: list[int]
    """The step of the last send of each fragment."""
    counted_steps: list[int]
    """The step of the last send of each fragment that was counted."""
    uncounted_tokens: float
    failure: str | None


def live(folder: str, plans: list[Plan]) -> Outcome | None:
    """The life of a process that `run_replicas(…, joined=False)` started, as its plan says."""
    plan = plans[int(os.environ["DILOCO_REPLICA"])]
    Path(folder, f"{plan.name}.pid").write_text(str(os.getpid()))
    if plan.clock_hours:
        right, seconds = time.time, 3600 * plan.clock_hours
        time.time = lambda: right() + seconds
    wait_for_entry(f"{folder}/run", plan.from_entry)
    replica = Replica(f"{folder}/run", name=plan.name.partition("#")[0], **plan.settings)
    failure = None
    try:
        for t in range(1, plan.num_steps + 1):
            replica.step(tokens=plan.tokens, pause_seconds=plan.step_seconds)
            if (
                plan.kill_at
                and t >= plan.kill_at
                and any(steps for _, steps in replica.engine._membership.counted)
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.stops is not None and t == plan.stops[1]:
                step_while_stopped(replica, int(Path(folder, f"{plan.stops[0]}.pid").read_text()), plan)
        replica.finish()
    except DilocoError as error:
        failure = str(error)
    return Outcome(
        replica=replica.exchange.replica,
        num_steps=replica.engine.num_steps,
        rounds=replica.rounds,
        outer=replica.outer(),
        sent_steps=list(replica.engine._replica.last_sent),
        counted_steps=[steps for _, steps in replica.engine._membership.counted],
        uncounted_tokens=replica.engine._membership.uncounted_tokens,
        failure=failure,
    )


def step_while_stopped(replica: Replica, pid: int, plan: Plan) -> None:
    """Stop a process, and take inner steps until each lively replica was counted once more, or has left."""
    os.kill(pid, signal.SIGSTOP)
    try:
        before = {member.name: member.steps for member in replica.exchange.state.members}
        waiting, deadline = set(plan.lively), time.monotonic() + 20
        while waiting:
            assert time.monotonic() < deadline, f"{waiting} wait for {plan.stops}"
            replica.step(tokens=plan.tokens, pause_seconds=plan.step_seconds)
            for member in replica.exchange.state.members:
                if member.left or member.steps > before.get(member.name, 0):
                    waiting.discard(member.name)
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for_entry(url: str, number: int) -> None:
    deadline = time.monotonic() + 60
    while number and not Path(url, "log", f"{number:010d}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
