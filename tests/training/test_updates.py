"""The inner optimizers' updates against references in NumPy, torch's own, and the authors'."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from schedulefree import AdamWScheduleFree
from tests.processes import run_replicas
from tests.training.cases import narrow, resolved, world_on_cpu

from diloco.engine.parameters import gathered, own_place, sharded_like
from diloco.errors import UserError
from diloco.training.config.config import OptimizerConfig
from diloco.training.optimizer import (
    SGD,
    AdamW,
    InnerOptimizer,
    Muon,
    ScheduleFree,
    Update,
    inner_optimizer,
    learning_rate,
)
from diloco.training.state import initial_state

ADAM = {"beta1": 0.8, "beta2": 0.7, "epsilon": 1e-3, "weight_decay": 0.3}
RATES = (0.02, 0.05, 0.05, 0.03, 0.01)
SHAPES = ((6, 4), (3, 8), (5, 5))


def adamw(theta, gradient) -> Iterator[np.ndarray]:
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, eta in enumerate(RATES, start=1):
        g = gradient(theta)
        m = 0.8 * m + 0.2 * g
        v = 0.7 * v + 0.3 * g**2
        direction = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.7**t)) + 1e-3)
        theta = theta - eta * (direction + 0.3 * theta)
        yield theta


def sgd(mu: float, nesterov: bool) -> Callable:
    def reference(theta, gradient) -> Iterator[np.ndarray]:
        v = np.zeros_like(theta)
        for eta in RATES:
            g = gradient(theta)
            v = mu * v + g
            theta = theta - eta * 0.3 * theta - eta * (g + mu * v if nesterov else v)
            yield theta

    return reference


def muon(nesterov: bool) -> Callable:
    def reference(theta, gradient) -> Iterator[np.ndarray]:
        b = np.zeros_like(theta)
        for eta in RATES:
            g = gradient(theta)
            b = 0.9 * b + 0.1 * g
            x = 0.1 * g + 0.9 * b if nesterov else b
            x = x / np.linalg.norm(x)
            for _ in range(5):
                x = 3.4445 * x - 4.775 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
            theta = theta - eta * 0.3 * theta - 0.2 * eta * np.sqrt(max(theta.shape)) * x
            yield theta

    return reference


def schedule_free(x, gradient) -> Iterator[np.ndarray]:
    """Schedule-free AdamW in x and z, as the paper has it."""
    z, v, sum_of_squares = x, np.zeros_like(x), 0.0
    for t, eta in enumerate(RATES, start=1):
        y = 0.2 * z + 0.8 * x
        g = gradient(y)
        v = 0.7 * v + 0.3 * g**2
        z = z - eta * (g / (np.sqrt(v / (1 - 0.7**t)) + 1e-3) + 0.3 * y)
        sum_of_squares += eta**2
        c = eta**2 / sum_of_squares
        x = (1 - c) * x + c * z
        yield x


@dataclass
class Case:
    """An update, its reference, and how far they may be apart; muon multiplies in bfloat16."""

    update: Update
    reference: Callable
    atol: float = 1e-6


CASES = {
    "adamw": Case(AdamW(**ADAM), adamw),
    "muon": Case(Muon(momentum=0.9, nesterov=True, ns_steps=5, weight_decay=0.3), muon(True), 3e-3),
    "muon, plain": Case(Muon(momentum=0.9, nesterov=False, ns_steps=5, weight_decay=0.3), muon(False), 3e-3),
    "sgd": Case(SGD(momentum=0.9, nesterov=True, weight_decay=0.3), sgd(0.9, True)),
    "sgd, plain": Case(SGD(momentum=0.6, nesterov=False, weight_decay=0.3), sgd(0.6, False)),
    "schedule_free": Case(ScheduleFree(**ADAM), schedule_free),
}


def begun(update: Update, start: np.ndarray) -> tuple[torch.nn.Parameter, InnerOptimizer]:
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    return parameter, InnerOptimizer([(update, [parameter])], 0.1)


def take_step(parameter: torch.nn.Parameter, optimizer: InnerOptimizer, gradient: Callable, rate: float) -> None:
    with optimizer.at_gradient_points():
        parameter.grad = torch.as_tensor(gradient(parameter.detach()), dtype=torch.float32)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_each_step_is_that_of_the_equation(name, shape):
    """The gradient depends on where it is taken, as that of a quadratic function."""
    case, rng = CASES[name], np.random.default_rng(0)
    start, center, scale = (rng.standard_normal(shape) for _ in range(3))
    parameter, optimizer = begun(case.update, start)
    for rate, expected in zip(RATES, case.reference(start, lambda theta: scale * (theta - center)), strict=True):
        take_step(parameter, optimizer, lambda theta: torch.tensor(scale) * (theta - torch.tensor(center)), rate)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=case.atol)


@pytest.mark.parametrize("name", CASES)
def test_a_rate_of_zero_moves_nothing(name):
    """As a step is taken that is only to be timed."""
    parameter, optimizer = begun(CASES[name].update, np.ones((2, 3)))
    for _ in range(2):
        take_step(parameter, optimizer, torch.ones_like, 0.0)
    assert torch.equal(parameter, torch.ones(2, 3))


TORCHS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.3, "fused": True}),
    "muon": (torch.optim.Muon, {"momentum": 0.9, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}),
}


@pytest.mark.parametrize("shape", [*SHAPES, (36, 128)])
@pytest.mark.parametrize("name", TORCHS)
def test_the_steps_are_torchs_bit_for_bit(name, shape):
    kind, options = TORCHS[name]
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape)
    ours, optimizer = begun(CASES[name].update, start)
    theirs = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    others = kind([theirs], lr=RATES[0], **options)
    for rate in RATES:
        gradient = rng.standard_normal(shape)
        take_step(ours, optimizer, lambda _, gradient=gradient: gradient, rate)
        theirs.grad = torch.tensor(gradient, dtype=torch.float32)
        others.param_groups[0]["lr"] = rate
        others.step()
        assert torch.equal(ours, theirs)
    assert all(torch.equal(value, others.state[theirs][key]) for key, value in optimizer.state[ours].items())


def test_schedule_free_is_its_authors():
    rng = np.random.default_rng(0)
    start = rng.standard_normal((6, 4))
    ours, optimizer = begun(ScheduleFree(**ADAM), start)
    theirs = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    settings = {"betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.3, "warmup_steps": 3}
    others = AdamWScheduleFree([theirs], lr=0.05, **settings)
    others.train()
    for rate in (0.05 / 3, 0.1 / 3, 0.05, 0.05, 0.05):
        take_step(ours, optimizer, torch.sin, rate)
        theirs.grad = theirs.detach().sin()
        others.step()
        others.eval()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        others.train()


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_not_finite_changes_nothing(name):
    parameter, optimizer = begun(CASES[name].update, np.ones((4, 3)))
    take_step(parameter, optimizer, torch.sin, 0.1)
    kept = [tensor.clone() for tensor in (parameter, *optimizer.state[parameter].values())]
    with optimizer.at_gradient_points():
        parameter.grad = torch.full((4, 3), torch.nan)
    optimizer.step(found_inf=torch.ones(()))
    assert all(map(torch.equal, (parameter, *optimizer.state[parameter].values()), kept))


def test_muon_moves_the_matrices_of_the_blocks_alone():
    model = resolved().model.build(seed=0)
    optimizer = inner_optimizer(model, OptimizerConfig(name="muon", weight_decay=0.0))
    by_muon = {n for n, p in model.named_parameters() if "exp_avg" not in optimizer.state[p]}
    assert by_muon == {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    assert len(by_muon) == 4 * 4
    model.blocks = torch.nn.ModuleList()
    with pytest.raises(UserError, match=r"optimizer\.name=muon moves matrices of the model's blocks, and none"):
        inner_optimizer(model, OptimizerConfig(name="muon", weight_decay=0.0))


def test_schedule_free_stays_at_the_peak_after_the_warmup():
    inner = OptimizerConfig(name="schedule_free", learning_rate=0.5, warmup_steps=4)
    assert [learning_rate(inner, step, num_steps=8) for step in range(1, 9)] == [0.125, 0.25, 0.375, *[0.5] * 5]


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "schedule_free"])
def test_an_independent_decay_is_of_the_parameters_whatever_the_peak(name):
    """Without a gradient, steps at half of the peak multiply by 1 − λ/2; schedule-free decays z, and averages."""
    model = resolved().model.build(seed=0)
    shrunk = []
    for peak in (0.5, 0.01):
        config = OptimizerConfig(name=name, learning_rate=peak, weight_decay=0.1, independent_weight_decay=True)
        optimizer = inner_optimizer(model, config)
        parameter = model.get_parameter("embedding.weight")
        parameter.grad, before = torch.zeros_like(parameter), parameter.detach().clone()
        for group in optimizer.param_groups:
            group["lr"] = peak / 2
        optimizer.step()
        shrunk.append(parameter.detach() / before)
    torch.testing.assert_close(shrunk[0], torch.full_like(shrunk[0], 0.95))
    torch.testing.assert_close(shrunk[0], shrunk[1])


STEPS = """
import sys, torch
from diloco.training.optimizer import InnerOptimizer
from diloco.training.optimizer import AdamW
parameter = torch.nn.Parameter(torch.ones(3))
adamw = AdamW(beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1)
optimizer = InnerOptimizer([(adamw, [parameter])], 0.1)
parameter.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_the_first_step_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def step_of_shards(name: str, mesh: tuple[int, int, int]) -> list[str]:
    """The parameters that a step of shards moves otherwise than a step of the whole, with the same gradients."""
    S, D, tensor_parallel = mesh
    sizes = {"shards_per_replica": S, "ddp_per_replica": D, "tensor_parallel": tensor_parallel}
    config = narrow(num_replicas=1, global_batch=4, optimizer=OptimizerConfig(name=name), **sizes)
    state, whole = initial_state(config, world_on_cpu(config)), config.model.build(seed=config.seed)
    optimizers = state.optimizer, inner_optimizer(whole, config.optimizer)
    rng = np.random.default_rng(0)
    for _ in range(3):
        for (_, shard), parameter in zip(state.model.named_parameters(), whole.parameters(), strict=True):
            parameter.grad = torch.tensor(rng.standard_normal(parameter.shape), dtype=torch.float32)
            shard.grad = sharded_like(parameter.grad[own_place(shard, part=False)].contiguous(), shard)
        for optimizer in optimizers:
            optimizer.step()
    named = zip(state.model.named_parameters(), whole.parameters(), strict=True)
    return [name for (name, shard), parameter in named if not torch.equal(gathered(shard), parameter)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("muon", (4, 1, 2)), ("schedule_free", (2, 1, 1))])
def test_a_step_of_shards_is_that_of_the_whole_bit_for_bit(name, mesh):
    assert run_replicas(step_of_shards, mesh[0] * mesh[1], name, mesh) == [[]] * (mesh[0] * mesh[1])
