"""The engine, in real processes, has the bits of examples/algorithm.py: all of Algorithm 1 in plain torch.

Legend: m of M replicas, p of P fragments, t of T steps, H sync period, τ overlap, α mixing, η and μ of the outer
step, θ a replica's parameters, Θ the outer parameters, Δ an outer gradient.
"""

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.processes import run_replicas
from torch import Tensor, nn

import diloco

ALGORITHM = Path(__file__).parents[1] / "examples" / "algorithm.py"
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run of both."""

    fragments: tuple[tuple[int, ...], ...] = ((0, 2), (1, 4), (3,))
    """The layers of each. They have 36, 105, 320, 126 and 28 elements: some fill no block of 256, some several."""
    T: int = 25
    H: int = 5
    τ: tuple[int, ...] = (1, 1, 1)
    """One per replica; as many are used as there are replicas."""
    α: float = 0.5
    η: float = 0.4
    μ: float = 0.9
    wire: str = "e3m0"
    early: bool = False
    optimizer: str = "adamw"

    @property
    def names(self) -> list[list[str]]:
        return [
            [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")] for layers in self.fragments
        ]

    def model(self) -> nn.Module:
        """Five linear layers; the same on every replica."""
        torch.manual_seed(3)
        sizes = (5, 6, 15, 20, 6)
        return nn.Sequential(*(nn.Linear(*pair) for pair in zip(sizes, (*sizes[1:], 4), strict=True)))


SETTINGS = [
    Setting(),
    Setting(τ=(0, 0, 0), α=0.0),
    Setting(τ=(0, 3, 4), optimizer="sgd"),
    Setting(τ=(4, 0, 2), α=0.0, early=True),
    Setting(H=7, τ=(6, 5, 6), α=0.3, early=True, T=24),
    Setting(fragments=((4, 2, 0, 1, 3),), τ=(2, 0, 1), optimizer="sgd"),
    Setting(fragments=((0,), (1,), (2,), (3,), (4,)), H=8, τ=(5, 7, 0), T=31, η=0.7, μ=0.0),
    Setting(fragments=((0,), (1,), (2,), (3,), (4,)), H=3, τ=(2, 1, 2), early=True, T=13),
    Setting(H=1, τ=(0, 0, 0), η=1.0, μ=0.0, α=0.0, wire="fp32", T=6),  # averaging
    Setting(fragments=((0, 1, 2, 3, 4),), τ=(0, 0, 0), η=0.7, α=0.0, wire="fp32"),  # DiLoCo
]


class State(NamedTuple):
    """The bits of a replica's parameters."""

    theta: bytes
    Theta: bytes


def loss(model: nn.Module, m: int, t: int) -> Tensor:
    """Regression on this replica's own batch."""
    batch = torch.randn(8, 9, generator=torch.Generator().manual_seed(100 * t + m))
    return (model(batch[:, :5]).tanh() - batch[:, 5:]).square().mean()


def flat(tensors: list[Tensor]) -> bytes:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy().tobytes()


def run_engine(settings: list[Setting]) -> list[list[State]]:
    """For each setting this replica's states after each step, then after `finish`."""
    return [_run_engine(setting, diloco.ProcessGroupExchange(timeout_seconds=20)) for setting in settings]


def _run_engine(setting: Setting, exchange: diloco.ProcessGroupExchange) -> list[State]:
    model = setting.model()
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=[diloco.Fragment(tuple(names)) for names in setting.names],
        schedule=diloco.Schedule(
            sync_every=setting.H,
            num_fragments=len(setting.fragments),
            overlap_steps=setting.τ[: exchange.num_replicas],
            first_sync="early" if setting.early else "full_period",
        ),
        outer=diloco.Nesterov(lr=setting.η, momentum=setting.μ),
        mixing=setting.α,
        wire=setting.wire,
        exchange=exchange,
    )
    order = [name for names in setting.names for name in names]

    def state() -> State:
        outer = engine.outer_parameters()
        return State(flat([model.get_parameter(name) for name in order]), flat([outer[name] for name in order]))

    states = []
    for t in range(1, setting.T + 1):
        optimizer.zero_grad()
        loss(model, exchange.replica, t).backward()
        optimizer.step()
        engine.step()
        states.append(state())
    engine.finish()
    return [*states, state()]


def run_algorithm(setting: Setting, M: int) -> list[list[State]]:
    """The same of every replica, by the example."""
    example = runpy.run_path(str(ALGORITHM))
    replicas = []
    for m in range(M):
        model = setting.model()
        optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
        replicas.append(example["Replica"](model, optimizer, setting.names, setting.τ[m]))

    def state(replica) -> State:
        return State(flat([tensor for θ_p in replica.θ for tensor in θ_p]), flat(replica.Θ))

    values = {name: getattr(setting, name) for name in ("T", "H", "α", "η", "μ", "early")}
    encoded = {"e3m0": example["e3m0"], "fp32": lambda Δ: Δ}[setting.wire]
    steps = [
        [state(replica) for replica in replicas]
        for _ in example["streaming_diloco"](replicas, loss, encoded=encoded, **values)
    ]
    return list(map(list, zip(*steps[: setting.T], steps[-1], strict=True)))


@pytest.mark.parametrize("M", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_engine_computes_algorithm_1_bit_for_bit(M):
    by_replica = run_replicas(run_engine, M, SETTINGS)
    for i, setting in enumerate(SETTINGS):
        expected = run_algorithm(setting, M)
        for m in range(M):
            for t, (actual, by_hand) in enumerate(zip(by_replica[m][i], expected[m], strict=True), start=1):
                where = f"replica {m} of {M}, step {t} of {setting.T}, {setting}"
                assert actual.Theta == by_hand.Theta, f"Θ of {where}"
                assert actual.theta == by_hand.theta, f"θ of {where}"
        assert len({states[i][-1].Theta for states in by_replica}) == 1, "after finish, Θ is one"


def vectors() -> dict[str, Tensor]:
    """Outer gradients that meet each rule of the format, in one block and in several."""
    generator = torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.arange(-9, 1)
    ties = torch.cat([powers, 1.5 * powers, torch.nextafter(1.5 * powers, torch.zeros(()))])
    normal = torch.randn(1000, generator=generator)
    return {
        "one element": torch.tensor([-0.3]),
        "ties": torch.cat([ties, -ties]),
        "a scale between two powers": torch.cat([1.5 * ties, -ties, torch.tensor([1.4999999])]),
        "blocks of other scales": normal * 10.0 ** torch.arange(-4, 1).repeat_interleave(200),
        "zeros": torch.zeros(300),
        "the smallest scale": normal * 2.0**-130,
        "subnormal": torch.tensor([2.0**-149, 2.0**-127, 1.5 * 2.0**-127, -(2.0**-133), 2.0**-134]),
        "the largest scale": torch.cat([normal * 2.0**120, torch.tensor([3.4e38, 1.7e38, -2.6e38])]),
    }


@pytest.mark.parametrize("name", list(vectors()))
def test_the_table_of_e3m0_is_the_codec(name):
    delta = vectors()[name]
    wire = diloco.codec("e3m0")
    decoded = wire.decode(wire.encode(delta), delta.numel())
    assert torch.equal(runpy.run_path(str(ALGORITHM))["e3m0"](delta), decoded)
