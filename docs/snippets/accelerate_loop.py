"""Accelerate's loop of one replica: each replica's job has DILOCO_ADDRESS, DILOCO_REPLICA, DILOCO_NUM_REPLICAS."""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import diloco
from diloco.integrations.accelerate import DiLoCo

replica = int(os.environ["DILOCO_REPLICA"])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
inputs = torch.randn(320, 8, generator=torch.Generator().manual_seed(replica))
loss_function = torch.nn.functional.mse_loss
dataloader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
held_out = torch.ones(4, 8, device=accelerator.device)
model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)


# --8<-- [start:loop]
def engine(model: torch.nn.Module) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model, fragments="whole", sync_every=5, overlap_steps=2, exchange=diloco.connect()
    )


with DiLoCo(accelerator=accelerator, model=model, build=engine) as diloco_:  # instead of LocalSGD
    for source, target in dataloader:
        with accelerator.accumulate(model):
            output = model(source)
            loss = loss_function(output, target)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.save_model(model, f"trained/replica-{replica}")  # Θ
# --8<-- [end:loop]

# --8<-- [start:evaluate]
with diloco_.engine.outer_parameters_applied(), torch.no_grad():
    held_out_loss = loss_function(model(held_out), held_out.sum(1, keepdim=True))
# --8<-- [end:evaluate]
outer_hash = diloco_.engine.outer_hash()
