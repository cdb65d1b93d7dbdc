"""Two sites of several processes each: DDP inside a site, Streaming DiLoCo between them.

Each site is a torchrun job of its own, which knows nothing of the other:

    torchrun --nproc-per-node 2 --master-port 29501 examples/two_sites.py --replica 0
    torchrun --nproc-per-node 2 --master-port 29502 examples/two_sites.py --replica 1

On two machines, `--address` is one of replica 0's machine that both reach.
"""

import argparse

# --8<-- [start:framework]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import diloco

parser = argparse.ArgumentParser()
parser.add_argument("--address", default="127.0.0.1:29500")
parser.add_argument("--replica", type=int, required=True)
parser.add_argument("--leader", action="store_true", help="let one process of the site exchange for all")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()

dist.init_process_group("gloo")  # the site's own: nccl on GPUs
torch.set_num_threads(1)
torch.manual_seed(0)  # the same initial parameters everywhere

width = arguments.width
layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
model = torch.nn.Sequential(
    torch.nn.Embedding(32, width), torch.nn.TransformerEncoder(layer, num_layers=4), torch.nn.Linear(width, 32)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# --8<-- [end:framework]

# --8<-- [start:engine]
exchange = diloco.connect(arguments.address, replica=arguments.replica, num_replicas=2, leader=arguments.leader)
engine = diloco.StreamingDiLoCo(model, fragments="strided", sync_every=20, overlap_steps=5, exchange=exchange)
engine.attach(optimizer)
# --8<-- [end:engine]

# --8<-- [start:loop]
inside = DistributedDataParallel(model)  # averages gradients within the site
data = torch.Generator().manual_seed(1 + arguments.replica * dist.get_world_size() + dist.get_rank())
for step in range(1, arguments.steps + 1):
    # The task: at each place, predict the largest token of the sequence.
    tokens = torch.randint(0, 32, (16, 12), generator=data)
    loss = F.cross_entropy(inside(tokens).flatten(0, 1), tokens.amax(1).repeat_interleave(12))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"replica {arguments.replica}, step {step}: loss {loss.item():.3f}", flush=True)

engine.finish()
# --8<-- [end:loop]
print(f"replica {arguments.replica}, process {dist.get_rank()}: outer hash {engine.outer_hash()[:16]}", flush=True)
if dist.get_rank() == 0:
    print(f"replica {arguments.replica}: {engine.bytes_sent:,} payload bytes sent by a process")
dist.destroy_process_group()
