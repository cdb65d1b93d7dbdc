"""Streaming DiLoCo in a plain PyTorch training loop; of this project it uses only the engine.

    torchrun --nproc-per-node 2 examples/own_loop.py

Each process is a replica with its own data. The model is torch's, and the loop is what it was before.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import diloco

# --8<-- [start:model]
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)  # the same initial parameters on every replica

layer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=256, batch_first=True, dropout=0.0)
model = torch.nn.Sequential(
    torch.nn.Embedding(32, 64), torch.nn.TransformerEncoder(layer, num_layers=4), torch.nn.Linear(64, 32)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# --8<-- [end:model]

# --8<-- [start:engine]
engine = diloco.StreamingDiLoCo(
    model,
    fragments="strided",
    sync_every=20,
    overlap_steps=5,
    exchange=diloco.ProcessGroupExchange(),  # over the default group, in which nothing else travels
)
engine.attach(optimizer)
# --8<-- [end:engine]

# --8<-- [start:loop]
torch.manual_seed(1 + dist.get_rank())  # from here on each replica has its own data, and dropout
for step in range(1, 101):
    # The task: at each place, predict the largest token of the sequence.
    tokens = torch.randint(0, 32, (16, 12))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.amax(1).repeat_interleave(12))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {engine.bytes_sent:,} bytes sent")

engine.finish()
# --8<-- [end:loop]
print(f"replica {dist.get_rank()}: outer hash {engine.outer_hash()[:16]}")
dist.destroy_process_group()
