"""Schedule-free optimizers: θ is x, and a merge moves x, y and z alike."""

import pytest
import torch
from tests.processes import run_replicas
from torch import nn

import diloco
from diloco.integrations.schedule_free import ScheduleFreeMasters

schedulefree = pytest.importorskip("schedulefree")

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "adamw": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.02),
    "sgd": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.5, momentum=0.8),
}


def train(kind: str, alpha: float) -> tuple[str, float, float, float]:
    """After the last merge Θ's hash, how far x is from Θ, how unlike the sequences moved, and the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = OPTIMIZERS[kind](model.parameters())
    optimizer.train()
    masters = ScheduleFreeMasters(model, optimizer)
    exchange = diloco.ProcessGroupExchange(timeout_seconds=20)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=10, num_fragments=1),
        outer=diloco.Nesterov(lr=1.0, momentum=0.0),
        mixing=alpha,
        wire="fp32",
        masters=masters,
        exchange=exchange,
    )
    names = tuple(dict(model.named_parameters()))
    start = masters.read(names)
    assert all(torch.equal(start[name], theta) for name, theta in engine.outer_parameters().items())
    data = torch.Generator().manual_seed(exchange.replica)
    moved = []
    for _ in range(200):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        before = {
            name: (p.detach().clone(), optimizer.state[p]["z"].clone()) for name, p in model.named_parameters()
        }
        x = masters.read(names)
        if engine.step():
            after = masters.read(names)
            for name, p in model.named_parameters():
                y, z = before[name]
                for now, was in ((p.detach(), y), (optimizer.state[p]["z"], z)):
                    moved.append(((now - was) - (after[name] - x[name])).abs().max().item())
    assert len(moved) == 20 * 2 * len(names)
    outer, x = engine.outer_parameters(), masters.read(names)
    distance = max((outer[name] - x[name]).abs().max().item() for name in names)
    optimizer.eval()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), x[name], rtol=0, atol=1e-6)
        assert torch.equal(masters.read(names)[name], p.detach()), "in evaluation the parameters are x"
    return engine.outer_hash(), distance, max(moved), loss.item()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_merge_moves_all_sequences_alike(kind):
    results = run_replicas(train, 2, kind, 0.0)
    assert len({outer_hash for outer_hash, *_ in results}) == 1
    for _, distance, moved, loss in results:
        assert distance < 1e-5 and moved < 1e-5
        assert loss < 2.0, "the variance of the target is 8"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimizers_evaluation_changes_nothing_while_the_model_holds_the_outer_parameters(kind):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    optimizer.train()
    masters = ScheduleFreeMasters(model, optimizer)
    settings = {"fragments": "whole", "sync_every": 4, "overlap_steps": 1, "wire": "fp32"}
    engine = diloco.StreamingDiLoCo(model, masters=masters, exchange=diloco.LoopbackExchange(), **settings)

    def train() -> None:
        for inputs in torch.randn(10, 16, 8):
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - inputs.sum(1)).square().mean().backward()
            optimizer.step()
            engine.step()

    def holds_outer() -> bool:
        return all(torch.equal(p, engine.outer_parameters()[name]) for name, p in model.named_parameters())

    train()
    y = [p.detach().clone() for p in model.parameters()]
    for calls in ((optimizer.eval, optimizer.train), (optimizer.eval,)):
        with engine.outer_parameters_applied():
            for call in calls:
                assert holds_outer()
                call()
        optimizer.train()
        assert all(torch.equal(p, then) for p, then in zip(model.parameters(), y, strict=True))
    train()
    engine.finish()
    engine.copy_outer_to_model()
    optimizer.eval()
    assert holds_outer()
    optimizer.train()
    train()
    engine.finish()


def test_parameters_of_another_optimizer_and_a_beta_of_zero_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = schedulefree.AdamWScheduleFree(model[0].parameters())
    with pytest.raises(
        diloco.UserError, match=r"parameter 1.weight is in no group of the schedule-free optimizer"
    ):
        ScheduleFreeMasters(model, optimizer).read(["1.weight"])
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), betas=(0.0, 0.9))
    with pytest.raises(diloco.UserError, match="with β = 0"):
        ScheduleFreeMasters(model, optimizer).read(["1.weight"])
