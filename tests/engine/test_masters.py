"""Optimizers with FP32 masters beside BF16 parameters, as Apex keeps them."""

import pytest
import torch
from tests.processes import run_replicas
from torch import nn

import diloco


class MastersSGD:
    """SGD on FP32 masters, which each step copies over the BF16 parameters."""

    def __init__(self, model: nn.Module, lr: float = 0.02) -> None:
        self._named, self._lr = dict(model.named_parameters()), lr
        self.masters = {name: p.detach().float().clone() for name, p in self._named.items()}

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self._named.items():
            self.masters[name] -= self._lr * p.grad.float()
            p.copy_(self.masters[name])
            p.grad = None


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)


def engine_of(
    model: nn.Module,
    *,
    sync_every: int = 20,
    overlap_steps: int = 0,
    exchange=None,
    wire: str = "fp32",
    **arguments,
) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=sync_every, num_fragments=1, overlap_steps=overlap_steps),
        exchange=exchange or diloco.ProcessGroupExchange(timeout_seconds=20),
        wire=wire,
        **arguments,
    )


def take_inner_step(model: nn.Module, optimizer: MastersSGD, data: torch.Generator) -> float:
    inputs = torch.randn(16, 8, generator=data)
    dtype = next(model.parameters()).dtype
    loss = (model(inputs.to(dtype)).squeeze(1).float() - inputs.sum(1)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(dtype: torch.dtype) -> tuple[str, float, list]:
    """With α = 0, masters end as Θ, and parameters as Θ in their dtype."""
    model = network(dtype)
    optimizer = MastersSGD(model)
    engine = engine_of(model, mixing=0.0, masters=optimizer.masters)
    calls = []
    handle = engine.on_merge(lambda names: calls.append((engine.num_steps, names)))
    data = torch.Generator().manual_seed(engine.exchange.replica)
    for step in range(1, 101):
        loss = take_inner_step(model, optimizer, data)
        engine.step()
        if step == 60:
            handle.remove()
    for name, outer in engine.outer_parameters().items():
        assert torch.equal(optimizer.masters[name], outer)
        assert torch.equal(model.get_parameter(name), outer.to(dtype))
    return engine.outer_hash(), loss, calls


def test_replicas_with_masters_train_one_model():
    names = tuple(dict(network().named_parameters()))
    results = run_replicas(train, 2, torch.bfloat16)
    assert len({outer_hash for outer_hash, _, _ in results}) == 1
    for _, loss, calls in results:
        assert loss < 2.0, "the variance of the target is 8"
        assert calls == [(20, names), (40, names), (60, names)]


class Plain(MastersSGD):
    """SGD on the parameters themselves, bit for bit what `MastersSGD` does in FP32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.masters = {name: p.detach() for name, p in model.named_parameters()}


def train_in_fp32(with_masters: bool) -> str:
    model = network(torch.float32)
    optimizer = MastersSGD(model) if with_masters else Plain(model)
    engine = engine_of(model, sync_every=7, masters=optimizer.masters if with_masters else None)
    data = torch.Generator().manual_seed(engine.exchange.replica)
    for _ in range(30):
        take_inner_step(model, optimizer, data)
        engine.step()
    return engine.outer_hash()


def test_masters_of_fp32_parameters_change_no_bit():
    assert run_replicas(train_in_fp32, 2, True) == run_replicas(train_in_fp32, 2, False)


def test_a_model_that_was_loaded_without_its_masters_is_refused_before_they_overwrite_it():
    model = network()
    parameters = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in parameters.items()}
    optimizer, bias = (
        torch.optim.SGD([m for n, m in masters.items() if n.endswith(k)]) for k in ("weight", "bias")
    )
    engine = engine_of(model, masters=masters, exchange=diloco.LoopbackExchange())
    saved = engine.state_dict()
    for master in masters.values():
        master.grad = torch.ones_like(master)

    def load() -> None:
        engine.load_state_dict(saved)
        model.load_state_dict({name: torch.full_like(p, 3.01) for name, p in parameters.items()})

    load()
    with pytest.raises(diloco.UserError, match=r"parameter 0.weight was loaded without .*: copy the model into"):
        optimizer.step()
    assert all(p.eq(torch.tensor(3.01).bfloat16()).all() for p in parameters.values())
    for name, master in masters.items():
        master.copy_(parameters[name] + 0.001)  # which rounds to the parameter
    for each in (optimizer, bias):
        each.step()
    engine.step()
    optimizer.step()


def test_reset_outer_and_copy_outer_to_model_know_the_masters():
    model = network()
    optimizer = MastersSGD(model)
    engine = engine_of(model, sync_every=5, masters=optimizer.masters, exchange=diloco.LoopbackExchange())
    data = torch.Generator().manual_seed(0)
    for _ in range(8):
        take_inner_step(model, optimizer, data)
        engine.step()
    engine.finish()
    engine.copy_outer_to_model()
    for name, outer in engine.outer_parameters().items():
        assert torch.equal(optimizer.masters[name], outer)
        assert torch.equal(model.get_parameter(name), outer.bfloat16())
    model.load_state_dict(network().state_dict())
    with pytest.raises(diloco.UserError, match=r"parameter 0.weight was loaded without its master"):
        engine.reset_outer()
    for name, parameter in model.named_parameters():
        optimizer.masters[name].copy_(parameter.detach())
    engine.reset_outer()
    for name, outer in engine.outer_parameters().items():
        assert torch.equal(outer, optimizer.masters[name])
