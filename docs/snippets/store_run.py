"""One replica of a run whose replicas come and go: start it on any machine, at any time."""

import os
import tempfile

import torch

import diloco

STORE = os.environ.get("RUN_STORE") or tempfile.mkdtemp()
torch.manual_seed(0)  # all replicas begin with the same parameters: the run compares them
block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(block, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# --8<-- [start:engine]
# Such as s3://bucket/run; credentials are in the environment.
rendezvous = diloco.StoreRendezvous(STORE, step_tokens=64)
engine = diloco.StreamingDiLoCo(model, fragments="strided", sync_every=10, overlap_steps=2, rendezvous=rendezvous)
# --8<-- [end:engine]

# --8<-- [start:loop]
BUDGET = 10_000
text = torch.randn(1_000, 16, 8)  # 1,000 sequences of 16 tokens, the same on all replicas
sampler = diloco.SlotSampler(num_windows=len(text))
place = rendezvous.start // 16  # sequences of this slot that its earlier holders have trained on
while not rendezvous.state.finished and rendezvous.state.tokens < BUDGET * len(engine.settings.fragments):
    batch = text[sampler.windows(rendezvous.slot, place, 4)]
    place += 4
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.step(tokens=64)  # never waits for the store or for another replica

engine.finish(close=True)  # all replicas end with the same outer parameters
rendezvous.leave()
# --8<-- [end:loop]
