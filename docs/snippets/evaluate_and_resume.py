"""Evaluate the outer parameters; save and resume with a fragment in flight."""

import tempfile
from pathlib import Path

import torch

import diloco


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, diloco.StreamingDiLoCo]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = diloco.StreamingDiLoCo(
        model, fragments="whole", sync_every=4, overlap_steps=2, exchange=diloco.LoopbackExchange()
    )
    engine.attach(optimizer)
    return model, optimizer, engine


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


model, optimizer, engine = build()
train(model, optimizer, range(1, 10))  # step 8 has sent a fragment, which step 10 merges
held_out = torch.ones(1, 8)

# --8<-- [start:evaluate]
with engine.outer_parameters_applied(), torch.no_grad():
    loss = (model(held_out) - 8).square().mean()
# --8<-- [end:evaluate]

path = Path(tempfile.mkdtemp(), "replica-0.pt")
# --8<-- [start:save]
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}, path)
# --8<-- [end:save]
train(model, optimizer, range(10, 21))
engine.finish()
undisturbed = engine.outer_hash()

model, optimizer, engine = build()
# --8<-- [start:resume]
saved = torch.load(path, weights_only=True)
engine.load_state_dict(saved["engine"])
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
# --8<-- [end:resume]
train(model, optimizer, range(engine.num_steps + 1, 21))
engine.finish()
assert engine.outer_hash() == undisturbed
