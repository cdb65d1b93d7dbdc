"""Curves of one's own loop in a tracker, and its counters for Prometheus."""

import tempfile
from pathlib import Path

import torch

import diloco
from diloco.integrations.prometheus import MetricsServer
from diloco.integrations.trackers import tracker

directory, port = Path(tempfile.mkdtemp()), 0
exchange = diloco.LoopbackExchange()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = diloco.StreamingDiLoCo(model, fragments="whole", sync_every=4, overlap_steps=0, exchange=exchange)
batches = torch.randn(12, 16, 8)

# --8<-- [start:loop]
curves = tracker(
    "tensorboard",  # or "wandb", or "mlflow"
    run="first",
    replica=exchange.replica,
    hparams={"sync_every": 4, "learning_rate": 1e-2},
    directory=directory,
)
for step, batch in enumerate(batches, start=1):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    outer_steps = engine.step()
    curves.log({"loss": loss.item(), **(engine.logs() if outer_steps else {})}, step)
curves.close()
# --8<-- [end:loop]

# --8<-- [start:prometheus]
server = MetricsServer(engine, port, replica=exchange.replica)  # until server.close()
# --8<-- [end:prometheus]
server.close()
assert engine.logs()["num_steps"] == 12
assert list((directory / "tensorboard" / "replica-0").iterdir())
