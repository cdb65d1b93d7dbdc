"""The methods as settings of one engine."""

import torch

import diloco

model = torch.nn.Sequential()
model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

# --8<-- [start:settings]
exchange = diloco.LoopbackExchange()  # one replica alone; between replicas: ProcessGroupExchange

engine = diloco.StreamingDiLoCo(  # Streaming DiLoCo: overlap, mixing, four bits on the wire
    model,
    fragments="strided",
    sync_every=30,
    overlap_steps=1,
    mixing=0.5,
    wire="e3m0",
    exchange=exchange,
)
engine = diloco.StreamingDiLoCo(  # DiLoCo: one fragment, no overlap, no mixing
    model,
    fragments="whole",
    sync_every=500,
    overlap_steps=0,
    mixing=0.0,
    wire="fp32",
    exchange=exchange,
)
engine = diloco.StreamingDiLoCo(  # Local SGD, FedAvg: the average replaces the parameters
    model,
    fragments="whole",
    sync_every=20,
    overlap_steps=0,
    outer=diloco.Nesterov(lr=1.0, momentum=0.0),
    mixing=0.0,
    wire="fp32",
    exchange=exchange,
)
# --8<-- [end:settings]
