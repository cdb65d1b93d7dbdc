"""Replicas of two processes each: a transformers model, sharded with FSDP2, in a plain PyTorch loop that resumes.

    pip install transformers
    torchrun --nproc-per-node 4 examples/sharded_replicas.py
    torchrun --nproc-per-node 2 examples/sharded_replicas.py --num-shards 1 --resume

Ranks 0 and 1 are the first replica, 2 and 3 the second; rank 0 exchanges with rank 2, and rank 1 with rank 3. The
second command continues from the first's checkpoint, with replicas of one process.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import diloco

parser = argparse.ArgumentParser()
parser.add_argument("--num-shards", type=int, default=2)
parser.add_argument("--checkpoints", type=Path, default=Path("sharded_replicas"))
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)  # the same initial parameters everywhere

# --8<-- [start:sharding]
num_replicas = dist.get_world_size() // arguments.num_shards
mesh = init_device_mesh("cpu", (num_replicas, arguments.num_shards), mesh_dim_names=("replica", "shard"))
replica, shard = mesh.get_local_rank("replica"), mesh.get_local_rank("shard")
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
for module in (*model.model.layers, model):
    fully_shard(module, mesh=mesh["shard"], reshard_after_forward=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# --8<-- [end:sharding]

# --8<-- [start:engine]
num_shards = arguments.num_shards
members = [[index * num_shards + s for index in range(num_replicas)] for s in range(num_shards)]
groups = [dist.new_group(ranks, backend="gloo") for ranks in members]  # every process makes every group
group = groups[shard]
assert isinstance(group, dist.ProcessGroup), "this process belongs to the group of its shard"
exchange = diloco.ProcessGroupExchange(group, timeout_seconds=240)

engine = diloco.StreamingDiLoCo(model, fragments="strided", sync_every=20, overlap_steps=5, exchange=exchange)
# --8<-- [end:engine]

# --8<-- [start:checkpoints]
# One checkpoint per replica, read and written by its own processes: replicas differ.
of_replica = {
    "checkpoint_id": arguments.checkpoints / f"replica-{replica}",
    "process_group": mesh.get_group("shard"),
}


def save() -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "engine": engine}, **of_replica)


def resume() -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "engine": engine}
    dcp.load(state, **of_replica)  # the engine is loaded with that
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# --8<-- [end:checkpoints]

if arguments.resume:
    resume()
for step in range(engine.num_steps + 1, 41):
    # The task: sequences that count up. Each shard takes its part of the replica's batch.
    data = torch.Generator().manual_seed(step * num_replicas + replica)
    tokens = (torch.randint(0, 32, (16, 1), generator=data) + torch.arange(12)) % 32
    part = tokens.chunk(arguments.num_shards)[shard]
    loss = model(input_ids=part, labels=part).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.step()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {engine.bytes_sent:,} bytes sent by the replica")
    if step == 22:
        save()  # with a fragment in flight

engine.finish()
print(f"replica {replica}, shard {shard}: outer hash {engine.outer_hash()[:16]}")
dist.destroy_process_group()
