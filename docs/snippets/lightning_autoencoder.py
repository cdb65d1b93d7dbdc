"""Lightning's autoencoder as one replica of DiLoCo; random images stand in for MNIST."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# --8<-- [start:engine]
import diloco
from diloco.integrations.lightning import DiLoCoCallback


def build(module: nn.Module) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        module,
        fragments="whole",
        sync_every=4,
        overlap_steps=1,
        exchange=diloco.connect(),  # DILOCO_ADDRESS, DILOCO_REPLICA, DILOCO_NUM_REPLICAS
    )


# --8<-- [end:engine]


class LitAutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


replica = int(os.environ["DILOCO_REPLICA"])
images = torch.rand(512, 1, 28, 28, generator=torch.Generator().manual_seed(0))

# --8<-- [start:fit]
L.seed_everything(0)  # all replicas start from the same weights
autoencoder = LitAutoEncoder()
train_loader = DataLoader(TensorDataset(images[replica:-64:2]), batch_size=16)  # each has data of its own
val_loader = DataLoader(TensorDataset(images[-64:]), batch_size=16)  # and all the same to validate on
callback = DiLoCoCallback(build)
trainer = L.Trainer(
    max_epochs=2,
    callbacks=[callback],
    default_root_dir=f"runs/replica-{replica}",
    accelerator="cpu",
    logger=False,
)
trainer.fit(autoencoder, train_loader, val_loader)
trainer.save_checkpoint(f"runs/replica-{replica}/autoencoder.ckpt")  # Θ
# --8<-- [end:fit]

loaded = LitAutoEncoder.load_from_checkpoint(f"runs/replica-{replica}/autoencoder.ckpt", weights_only=True)
assert all(map(torch.equal, autoencoder.parameters(), loaded.parameters()))
outer_hash = callback.engine.outer_hash()
