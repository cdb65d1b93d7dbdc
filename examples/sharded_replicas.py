"""Replicas of two processes each: a transformers model, sharded with FSDP2, in a loop of one's own.

    pip install transformers
    torchrun --nproc-per-node 4 examples/sharded_replicas.py

Ranks 0 and 1 are the first replica, 2 and 3 the second; rank 0 exchanges with rank 2, and rank 1 with rank 3.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import diloco

NUM_SHARDS = 2

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)  # the same initial parameters everywhere

mesh = init_device_mesh(
    "cpu", (dist.get_world_size() // NUM_SHARDS, NUM_SHARDS), mesh_dim_names=("replica", "shard")
)
replica, shard = mesh.get_local_rank("replica"), mesh.get_local_rank("shard")
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
for module in (*model.model.layers, model):
    fully_shard(module, mesh=mesh["shard"], reshard_after_forward=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

fragments = diloco.strided(model, layers_per_fragment=2)
engine = diloco.StreamingDiLoCo(
    model,
    fragments=fragments,
    schedule=diloco.Schedule(sync_every=20, num_fragments=len(fragments), overlap_steps=5),
    exchange=diloco.ProcessGroupExchange(mesh.get_group("replica")),
)

data = torch.Generator().manual_seed(1 + replica)
for step in range(1, 101):
    # To learn: sequences that count up. Each shard takes its part of the replica's batch.
    tokens = (torch.randint(0, 32, (16, 1), generator=data) + torch.arange(12)) % 32
    part = tokens.chunk(NUM_SHARDS)[shard]
    loss = model(input_ids=part, labels=part).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.step()
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {engine.bytes_sent:,} bytes sent by the replica")

engine.finish()
print(f"replica {replica}, shard {shard}: outer hash {engine.outer_hash()[:16]}")
dist.destroy_process_group()
