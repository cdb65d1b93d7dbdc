"""An optimizer with FP32 masters beside BF16 parameters, and the engine that merges into the masters."""

import torch
from torch import nn

import diloco

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)

# --8<-- [start:masters]
parameters = dict(model.named_parameters())
masters = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)


@torch.no_grad()
def inner_step() -> None:
    for name, master in masters.items():
        gradient = parameters[name].grad
        assert gradient is not None, "every parameter is used"
        master.grad = gradient.float()
    optimizer.step()
    for name, master in masters.items():
        parameters[name].copy_(master)


engine = diloco.StreamingDiLoCo(
    model,
    fragments="whole",
    sync_every=10,
    overlap_steps=2,
    masters=masters,
    exchange=diloco.LoopbackExchange(),
)
# --8<-- [end:masters]

losses = []
for _ in range(60):
    inputs = torch.randn(16, 8)
    model.zero_grad()
    loss = (model(inputs.bfloat16()).squeeze(1).float() - inputs.sum(1)).square().mean()
    loss.backward()
    inner_step()
    engine.step()
    losses.append(loss.item())
engine.finish()
assert losses[-1] < losses[0]
