"""A gloo group for the exchange beside nccl for the program itself; needs a GPU and torchrun."""

import os

import torch
import torch.distributed as dist

import diloco

# --8<-- [start:group]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")  # what your program wants for itself
exchange = diloco.ProcessGroupExchange(dist.new_group(backend="gloo"))
# --8<-- [end:group]
print(f"{exchange.num_replicas} replicas")
dist.destroy_process_group()
