"""Runs of the engine and of the reference.

Legend: m of M replicas, P fragments, t of T steps, H sync period, τ overlap, α mixing, η and μ of the outer
step, θ a replica's parameters, Θ the outer parameters. Vectors hold all parameters, fragment after fragment.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tests import reference
from tests.wire import reference as wire_reference
from torch import nn

import diloco
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica import Replica, outer_state
from diloco.engine.settings import settings_of
from diloco.outer.merge import Mixing

f32 = np.float32


LR = 0.3


SIZES = (3, 1, 299, 6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of the engine and of the reference."""

    P: int = 2
    H: int = 4
    T: int = 13
    tau: int | tuple[int, ...] = 1
    alpha: float = 0.5
    eta: float = 0.4
    mu: float = 0.9
    wire: str = "fp32"
    combine: str = "gather"
    beta: float | None = None
    offload: bool = False
    offsets: tuple[int, ...] | None = None
    first_sync: reference.FirstSync = "full_period"
    parameters: str = "fp32"
    """The dtype of the model's parameters, by the name of its codec."""
    layers_per_fragment: int = 1
    weights: str = "equal"
    seed: int = 0
    lr: float = LR
    """The inner steps' rate: with a small one, BF16 does not see every change."""

    def schedule(self) -> diloco.Schedule:
        return diloco.Schedule(
            sync_every=self.H,
            num_fragments=self.P,
            overlap_steps=self.tau,
            offsets=self.offsets,
            first_sync=self.first_sync,
        )

    def model(self) -> nn.Module:
        """Blocks of unequal sizes, of two parameters each; the same on every replica."""
        torch.manual_seed(self.seed)
        model = nn.Module()
        sizes = SIZES[: self.P * self.layers_per_fragment]
        model.blocks = nn.ModuleList(nn.Linear(size, 1) for size in sizes)
        return model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[self.parameters])

    def engine(self, model: nn.Module, **changes) -> diloco.StreamingDiLoCo:
        """Over the process group, or alone where there is none."""
        arguments = {
            "fragments": diloco.sequential(model, layers_per_fragment=self.layers_per_fragment),
            "schedule": self.schedule(),
            "outer": diloco.Nesterov(lr=self.eta, momentum=self.mu),
            "mixing": Mixing(1.0) if self.alpha == 1 else self.alpha,  # a plain 1 is refused
            "wire": self.wire,
            "combine": self.combine,
            "error_feedback": self.beta,
            "offload": self.offload,
            "weights": self.weights,
            "exchange": exchange(),
        }
        return diloco.StreamingDiLoCo(model, **(arguments | changes))

    def reference(self, M: int) -> reference.History:
        """The same run in NumPy."""
        cuts = np.cumsum([size + 1 for size in SIZES[: self.P]])[:-1]
        store = through(self.parameters)

        def inner_step(thetas, m, t):
            # The reference merges in FP32: a model in BF16 rounds what it writes.
            return np.split(store(inner(store(np.concatenate(thetas)), m, t, self.lr)), cuts)

        return reference.run(
            theta0=np.split(theta_of(self.model()), cuts),
            inner_step=inner_step,
            T=self.T,
            H=self.H,
            P=self.P,
            taus=[self.schedule().overlap(m) for m in range(M)],
            alpha=self.alpha,
            M=M,
            eta=self.eta,
            mu=self.mu,
            codec=through(self.wire),
            offsets=self.offsets,
            first_sync=self.first_sync,
            beta=self.beta,
            second=self.second(),
            amount=lambda m, steps: AMOUNTS[self.weights](sum(tokens(m, t) for t in steps), len(steps)),
        )

    def second(self) -> Callable[..., np.ndarray] | None:
        """The codec of averages; None in gather."""
        way, _, second = self.combine.partition(":")
        return None if way == "gather" else through(second or self.wire)


AMOUNTS: dict[str, Callable[[int, int], float]] = {
    "equal": lambda tokens, steps: 1.0,
    "tokens": lambda tokens, steps: tokens,
    "tokens_squared_per_step": lambda tokens, steps: tokens**2 / steps,
}
"""The amount that a replica's weight is in proportion to."""


def tokens(m: int, t: int) -> int:
    """The tokens that a replica reads in a step."""
    return 1_000_003 * (1 + (7 * m + 3 * t) % 11)


def through(wire: str) -> Callable[..., np.ndarray]:
    """decode(encode(Δ)), given Δ, and Θ for a codec that needs it."""
    return lambda delta, outer=None: wire_reference.decode(
        wire, wire_reference.encode(wire, delta, outer=outer), len(delta)
    )


def exchange(timeout_seconds: float = 20.0) -> diloco.ProcessGroupExchange | diloco.LoopbackExchange:
    if dist.is_initialized():
        return diloco.ProcessGroupExchange(timeout_seconds=timeout_seconds)
    return diloco.LoopbackExchange()


def inner(theta: np.ndarray, m: int, t: int, lr: float = LR) -> np.ndarray:
    """A step of gradient descent on ½‖θ − target‖², with a target for each replica and step."""
    target = np.random.default_rng((m, t)).standard_normal(len(theta)).astype(f32)
    return theta - f32(lr) * (theta - target)


def theta_of(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).numpy()


def outer_of(engine: diloco.StreamingDiLoCo) -> np.ndarray:
    return torch.cat([p.reshape(-1) for p in engine.outer_parameters().values()]).numpy()


def inner_step(model: nn.Module, m: int, t: int, lr: float = LR) -> None:
    theta_N = torch.from_numpy(inner(theta_of(model), m, t, lr))
    parts = theta_N.split([p.numel() for p in model.parameters()])
    with torch.no_grad():
        for p, part_N in zip(model.parameters(), parts, strict=True):
            p.copy_(part_N.view_as(p))


class Snapshot(NamedTuple):
    theta: np.ndarray
    Theta: np.ndarray


def train(
    engine: diloco.StreamingDiLoCo,
    model: nn.Module,
    T: int,
    after_step: Callable[[int], None] = lambda t: None,
    lr: float = LR,
) -> Iterator[Snapshot]:
    """θ and Θ after each step that is still to be taken, then after the drain."""
    for t in range(engine.num_steps + 1, T + 1):
        inner_step(model, engine.exchange.replica, t, lr)
        engine.step(tokens=tokens(engine.exchange.replica, t))
        after_step(t)
        yield Snapshot(theta_of(model), outer_of(engine))
    engine.finish()
    yield Snapshot(theta_of(model), outer_of(engine))


def parts_of(model: nn.Module, *, sync_every: int, overlap_steps: int, **settings) -> Replica:
    """A replica without a membership: fragments of one layer, in FP32, with changes."""
    fragments = settings.pop("fragments", None) or diloco.sequential(model, layers_per_fragment=1)
    defaults = {
        "fragments": fragments,
        "outer": None,
        "wire": "fp32",
        "combine": "gather",
        "error_feedback": None,
        "seed": 0,
        "buffers": "own",
        "weights": "equal",
    }
    timing = {"sync_every": sync_every, "overlap_steps": overlap_steps}
    of_engine = settings_of(
        model, schedule_for=lambda number: diloco.Schedule(num_fragments=number, **timing), **defaults | settings
    )
    parameters = FragmentParameters(model, of_engine.fragments)
    return Replica(of_engine, parameters, outer_state(of_engine, parameters, offload=False))


def run_cases(cases: list[Case]) -> list[tuple[list[Snapshot], str]]:
    results = []
    for case in cases:
        model = case.model()
        engine = case.engine(model)
        results.append((list(train(engine, model, case.T, lr=case.lr)), engine.outer_hash()))
    return results
