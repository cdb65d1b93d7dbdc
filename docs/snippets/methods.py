"""The methods as settings of one engine."""

import torch

import diloco

model = torch.nn.Sequential()
model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

# --8<-- [start:settings]
exchange = diloco.LoopbackExchange()  # one replica alone; between replicas: ProcessGroupExchange

streaming = diloco.strided(model, layers_per_fragment=3)
engine = diloco.StreamingDiLoCo(  # Streaming DiLoCo: overlap, mixing, four bits on the wire
    model,
    fragments=streaming,
    schedule=diloco.Schedule(sync_every=30, num_fragments=len(streaming), overlap_steps=1),
    mixing=0.5,
    wire="e3m0",
    exchange=exchange,
)
engine = diloco.StreamingDiLoCo(  # DiLoCo: one fragment, no overlap, no mixing
    model,
    fragments=diloco.whole(model),
    schedule=diloco.Schedule(sync_every=500, num_fragments=1),
    mixing=0.0,
    wire="fp32",
    exchange=exchange,
)
engine = diloco.StreamingDiLoCo(  # Local SGD, FedAvg: the average replaces the parameters
    model,
    fragments=diloco.whole(model),
    schedule=diloco.Schedule(sync_every=20, num_fragments=1),
    outer=diloco.Nesterov(lr=1.0, momentum=0.0),
    mixing=0.0,
    wire="fp32",
    exchange=exchange,
)
# --8<-- [end:settings]
