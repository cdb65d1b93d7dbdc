"""One replica, sharded over the processes of a machine: torchrun --nproc-per-node 2 sharded_store_run.py"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import diloco

STORE = os.environ.get("RUN_STORE", "run")
dist.init_process_group("gloo")
shard, num_shards = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all replicas begin with the same parameters: the run compares them
block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(block, 2)

# --8<-- [start:engine]
mesh = init_device_mesh("cpu", (num_shards,))
for module in (*model.layers, model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rendezvous = diloco.StoreRendezvous(STORE, name="node", step_tokens=64)  # the first process alone joins with it
engine = diloco.StreamingDiLoCo(model, fragments="strided", sync_every=10, overlap_steps=2, rendezvous=rendezvous)
# --8<-- [end:engine]


# --8<-- [start:loop]
def of_first(read: Callable[[], int]) -> int:
    """A whole number that the first process knows, in all processes."""
    value = torch.tensor(read() if shard == 0 else 0)
    dist.broadcast(value, 0)
    return int(value)


def is_over() -> bool:
    return rendezvous.state.finished or rendezvous.state.tokens >= BUDGET * len(engine.settings.fragments)


BUDGET = 5_000
text = torch.randn(1_000, 16, 8, generator=torch.Generator().manual_seed(0))  # the same on all replicas
sampler = diloco.SlotSampler(num_windows=len(text))
slot, place = of_first(lambda: rendezvous.slot), of_first(lambda: rendezvous.start // 16)
while not of_first(is_over):
    batch = text[sampler.windows(slot, place, 4)].chunk(num_shards)[shard]
    place += 4
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.step(tokens=64)  # of all processes together

engine.finish(close=True)  # all replicas end with the same outer parameters
rendezvous.leave()
# --8<-- [end:loop]
print(f"outer hash {engine.outer_hash()[:16]}")
dist.destroy_process_group()
