"""Lightning jobs for tests: a tiny model and its Trainers, in a module that pytest does not collect."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.integrations.jobs import build, die, is_killed, meet_at
from tests.running import run_snippets
from torch import nn

import diloco
from diloco.integrations.lightning import DiLoCoCallback
from diloco.outer.digest import parameters_hash

EPOCHS, KILLED_AT = 5, 11
"""The last checkpoint is then that of step 9, in which a fragment is in flight."""
STEPS = 15
ACCUMULATED = 2


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.validated: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        loss = self.loss(batch[0])
        self.validated.append(loss.item())
        self.log("val_loss", loss)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch[0]))

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.layers(inputs).squeeze(1) - inputs.sum(1)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


class StepsByHand(Module):
    """Steps each of its optimizers so often in a batch, and in every other batch not at all."""

    def __init__(self, *num_steps: int, outside: nn.Module | None = None) -> None:
        super().__init__()
        self.num_steps, self.of_optimizers = num_steps, {"outside": outside}  # a dict hides the module
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers() if len(self.num_steps) > 1 else [self.optimizers()]
        for optimizer, num_steps in zip(optimizers, self.num_steps, strict=True):
            for _ in range(num_steps * (batch_idx % 2)):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch[0]))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        trained = self.of_optimizers["outside"] or self
        return [torch.optim.SGD(trained.parameters(), lr=0.02) for _ in self.num_steps]


class Head(Module):
    """Leaves its frozen encoder out of checkpoints, with copies of the rest, and more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.encoder = nn.Linear(8, 8).requires_grad_(False)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        own = super().state_dict(*args, **options)
        return {name: value.clone() for name, value in own.items() if "encoder" not in name} | {"_extra_state": {}}

    def set_extra_state(self, state: object) -> None: ...


def data(seed: int, num_rows: int) -> Any:
    rows = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16)


def trainer_of(folder: str, *callbacks: Any, **changes: Any) -> Any:
    options = {
        "accelerator": "cpu",
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATED,
        "gradient_clip_val": 0.5,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **changes,
    }
    if options.get("enable_checkpointing", True):
        callbacks = (pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=-1, save_last=True), *callbacks)
    return pl.Trainer(default_root_dir=folder, callbacks=[DiLoCoCallback(build), *callbacks], **options)


def engine_of(trainer: Any) -> diloco.StreamingDiLoCo:
    (callback,) = [callback for callback in trainer.callbacks if hasattr(callback, "engine")]
    return callback.engine


def fit(trainer: Any, module: Module, **options: Any) -> None:
    replica = int(os.environ.get("DILOCO_REPLICA", "0"))
    trainer.fit(module, data(replica, 16 * ACCUMULATED * STEPS // EPOCHS), data(99, 16), **options)


class Kill(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == KILLED_AT:
            die()


def train_and_be_killed(folder: str) -> None:
    fit(trainer_of(folder, Kill()), Module())


def train(folder: str, ports: list[int]) -> Any:
    """Numbers 0 and 1 are replicas of a process each, 2 to 5 two of two processes, and 6 and 7 the snippet's."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    number = int(os.environ["DILOCO_REPLICA"])
    os.environ["DILOCO_NUM_REPLICAS"] = "2"
    if number < 2:
        return train_replica(f"{folder}/replica-{number}", number, ports[:4])
    if number > 5:
        os.environ["DILOCO_REPLICA"] = str(number - 6)
        return run_snippets(["lightning_autoencoder.py"], ports[7:], folder)
    return train_one_of_two(*divmod(number - 2, 2), ports[4:])


def train_replica(folder: str, replica: int, ports: list[int]) -> dict[str, Any]:
    """A run that is killed and resumed, and then the same run undisturbed."""
    is_killed(train_and_be_killed, folder, port=ports[0])

    meet_at(ports[1])
    trainer, module = trainer_of(folder), Module()
    (last,) = Path(folder).rglob("last.ckpt")
    fit(trainer, module, ckpt_path=str(last))
    engine = engine_of(trainer)
    trainer.save_checkpoint(f"{folder}/shipped.ckpt")
    best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    loaded = Module.load_from_checkpoint(f"{folder}/shipped.ckpt", weights_only=True)

    meet_at(ports[2])
    undisturbed = trainer_of(f"{folder}/undisturbed", limit_val_batches=0, enable_checkpointing=False)
    fit(undisturbed, Module())

    meet_at(ports[3])
    with pytest.raises(diloco.DisagreementError, match="disagree on estimated_stepping_batches: replica 0 has 6"):
        fit(trainer_of(f"{folder}/uneven", max_steps=6 + replica), Module())
    return {
        "hash": engine.outer_hash(),
        "num_steps": engine.num_steps,
        "shipped": parameters_hash(dict(loaded.named_parameters())),
        "undisturbed": engine_of(undisturbed).outer_hash(),
        "validated": module.validated,
        "tested": trainer.test(module, data(99, 16), ckpt_path="best", verbose=False),
        "own_of_best": parameters_hash(best["diloco"]["own"]),
        "weights_of_best": parameters_hash(best["state_dict"]),
    }


def train_one_of_two(replica: int, rank: int, ports: list[int]) -> tuple[str, str, int]:
    """One of the two processes of a replica with DDP inside, started as torchrun starts them."""
    os.environ |= {"DILOCO_REPLICA": str(replica), "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[replica])}
    meet_at(ports[2])
    trainer, module = trainer_of("", strategy="ddp", devices=2, enable_checkpointing=False, max_steps=6), Module()
    fit(trainer, module)
    shipped = parameters_hash(dict(module.named_parameters()))
    return engine_of(trainer).outer_hash(), shipped, engine_of(trainer).num_steps


class SaveInside(pl.Callback):
    """Saves in the last validation and after it, and notes the parameters before and after the first save."""

    def __init__(self, folder: str) -> None:
        self.folder, self.hashes = folder, list[str]()

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step:
            self.hashes = [parameters_hash(dict(module.named_parameters()))]
            trainer.save_checkpoint(f"{self.folder}/inside.ckpt")
            self.hashes.append(parameters_hash(dict(module.named_parameters())))

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step and Path(self.folder, "inside.ckpt").exists():
            trainer.save_checkpoint(f"{self.folder}/after.ckpt")
