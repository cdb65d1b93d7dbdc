"""A gloo group for each shard; run by torchrun, as rank = replica · num_shards + shard."""

import torch.distributed as dist

import diloco

num_shards = 2
dist.init_process_group("gloo")
num_replicas = dist.get_world_size() // num_shards

# --8<-- [start:groups]
for shard in range(num_shards):
    ranks = [replica * num_shards + shard for replica in range(num_replicas)]
    group = dist.new_group(ranks, backend="gloo")  # every process makes every group, in one order
    if dist.get_rank() in ranks:
        exchange = diloco.ProcessGroupExchange(group, timeout_seconds=240)
# --8<-- [end:groups]
assert exchange.num_replicas == num_replicas
print(f"rank {dist.get_rank()} is replica {exchange.replica}")
dist.destroy_process_group()
