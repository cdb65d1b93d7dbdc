"""An exponential moving average of the outer parameters, which all replicas share."""

import torch

import diloco

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = diloco.StreamingDiLoCo(
    model, fragments="whole", sync_every=2, overlap_steps=0, exchange=diloco.LoopbackExchange()
)
batches = torch.randn(6, 8, 4)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


# --8<-- [start:ema]
ema = {name: outer.clone() for name, outer in engine.outer_parameters().items()}
for batch in batches:
    loss_of(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    for outer_step in engine.step():
        outer = engine.outer_parameters()
        for name in engine.settings.fragments[outer_step.sync.fragment].parameters:
            ema[name].lerp_(outer[name], 0.1)
# --8<-- [end:ema]
assert not torch.equal(ema["weight"], engine.outer_parameters()["weight"])
