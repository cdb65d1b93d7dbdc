"""Lightning: two replicas, each a Trainer of its own, on a tiny model."""

import logging
import os
import signal
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import free_port, run_replicas
from torch import nn

import diloco
from diloco.outer.digest import parameters_hash

pl = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.slow

EPOCHS, KILLED_AT = 5, 11
"""The last checkpoint is then that of step 9, in which a fragment is in flight."""
STEPS = 15
ACCUMULATED = 2


def build(module: nn.Module) -> diloco.StreamingDiLoCo:
    is_joined = "DILOCO_ADDRESS" in os.environ
    exchange = diloco.connect(timeout_seconds=60, leader=True) if is_joined else diloco.LoopbackExchange()
    schedule = diloco.Schedule(sync_every=4, num_fragments=1, overlap_steps=2)
    return diloco.StreamingDiLoCo(module, fragments=diloco.whole(module), schedule=schedule, exchange=exchange)


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


def data(seed: int, num_rows: int) -> Any:
    rows = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16)


def trainer_of(folder: str, *callbacks: Any, **changes: Any) -> Any:
    from diloco.integrations.lightning import DiLoCoCallback

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
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(folder: str, port: int) -> None:
    os.environ["DILOCO_ADDRESS"] = f"127.0.0.1:{port}"
    fit(trainer_of(folder, Kill()), Module())


def train_replica(folder: str, ports: list[int]) -> dict[str, Any]:
    """A run that is killed and resumed, and then the same run undisturbed."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = f"{folder}/replica-{os.environ['DILOCO_REPLICA']}"
    killed = get_context("fork").Process(target=train_and_be_killed, args=(folder, ports[0]))
    killed.start()
    killed.join(40)
    assert killed.exitcode == -signal.SIGKILL

    os.environ["DILOCO_ADDRESS"] = f"127.0.0.1:{ports[1]}"
    trainer, module = trainer_of(folder), Module()
    (last,) = Path(folder).rglob("last.ckpt")
    fit(trainer, module, ckpt_path=str(last))
    engine = engine_of(trainer)
    trainer.save_checkpoint(f"{folder}/shipped.ckpt")
    best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    loaded = Module.load_from_checkpoint(f"{folder}/shipped.ckpt", weights_only=True)

    os.environ["DILOCO_ADDRESS"] = f"127.0.0.1:{ports[2]}"
    undisturbed = trainer_of(f"{folder}/undisturbed", limit_val_batches=0, enable_checkpointing=False)
    fit(undisturbed, Module())

    os.environ["DILOCO_ADDRESS"] = f"127.0.0.1:{ports[3]}"
    with pytest.raises(diloco.DisagreementError, match="disagree on estimated_stepping_batches: replica 0 has 6"):
        fit(trainer_of(f"{folder}/uneven", max_steps=6 + int(os.environ["DILOCO_REPLICA"])), Module())
    return {
        "hash": engine.outer_hash(),
        "num_steps": engine.num_steps,
        "shipped": parameters_hash(dict(loaded.named_parameters())),
        "undisturbed": engine_of(undisturbed).outer_hash(),
        "validated": module.validated,
        "tested": trainer.test(module, data(99, 16), ckpt_path="best", verbose=False),
        "own_of_best": parameters_hash(best["diloco"]["own"]),
        "weights_of_best": parameters_hash(best["state_dict"]),
        "seconds": time.process_time(),
    }


def test_two_replicas_are_killed_and_resume(tmp_path):
    ports = [free_port() for _ in range(4)]
    results = run_replicas(train_replica, 2, str(tmp_path), ports, joined=False, timeout_seconds=120)
    for result in results:
        assert result["num_steps"] == STEPS, "micro-steps do not count"
        assert result["hash"] == result["undisturbed"], "neither kill -9 nor validation change a bit"
        assert result["hash"] == result["shipped"], "save_checkpoint() saves Θ"
        assert len(result["validated"]) == 3, "after the check of a resumed run, two epochs"
        (tested,) = result["tested"]
        assert tested["test_loss"] == pytest.approx(min(result["validated"][1:])), "the best checkpoint holds Θ"
    first, second = results
    assert first["hash"] == second["hash"]
    assert first["validated"] == second["validated"], "the replicas share Θ, and nothing else"
    assert first["weights_of_best"] == second["weights_of_best"]
    assert first["own_of_best"] != second["own_of_best"]
    assert first["validated"][-1] < first["validated"][0]


def train_one_of_two(ports: list[int]) -> tuple[str, str, int]:
    """One of the two processes of a replica with DDP inside, started as torchrun starts them."""
    warnings.simplefilter("ignore")
    replica, rank = divmod(int(os.environ["DILOCO_REPLICA"]), 2)
    os.environ |= {"DILOCO_REPLICA": str(replica), "DILOCO_NUM_REPLICAS": "2", "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[replica])}
    trainer, module = trainer_of("", strategy="ddp", devices=2, enable_checkpointing=False, max_steps=6), Module()
    fit(trainer, module)
    shipped = parameters_hash(dict(module.named_parameters()))
    return engine_of(trainer).outer_hash(), shipped, engine_of(trainer).num_steps


def test_two_replicas_of_two_processes_with_ddp_agree():
    ports = [free_port() for _ in range(2)]
    results = run_replicas(train_one_of_two, 4, ports, joined=False, timeout_seconds=120)
    assert results == [(results[0][0], results[0][0], 6)] * 4


def test_trainers_that_would_lose_the_outer_parameters_are_refused(tmp_path):
    averaging = pl.callbacks.EMAWeightAveraging()
    with pytest.raises(
        diloco.UserError, match="EMAWeightAveraging would leave its own average in the model, not Θ"
    ):
        fit(trainer_of(str(tmp_path), averaging), Module())
    weights_only = pl.callbacks.ModelCheckpoint(save_weights_only=True, monitor="train_loss")
    with pytest.raises(diloco.UserError, match="save_weights_only=True would save one replica's own parameters"):
        fit(trainer_of(str(tmp_path), weights_only), Module())
    trainer = trainer_of(str(tmp_path))
    trainer.strategy.__class__ = type(
        "FSDPStrategy", (type(trainer.strategy),), {"restore_checkpoint_after_setup": True}
    )
    with pytest.raises(diloco.UserError, match="on one device or under DDP, not with FSDPStrategy"):
        fit(trainer, Module())


def test_one_trainer_whose_processes_are_replicas_is_refused(tmp_path, monkeypatch):
    from diloco.integrations.lightning import DiLoCoCallback

    def build_inside(module: nn.Module) -> diloco.StreamingDiLoCo:
        return diloco.StreamingDiLoCo(
            module,
            fragments=diloco.whole(module),
            schedule=diloco.Schedule(sync_every=4, num_fragments=1),
            exchange=diloco.ProcessGroupExchange(),
        )

    trainer = trainer_of(str(tmp_path))
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    store = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(diloco.UserError, match="this Trainer's 2 processes average their gradients"):
            DiLoCoCallback(build_inside).setup(trainer, Module(), "fit")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    trainer = trainer_of(str(tmp_path), max_epochs=1)
    with pytest.raises(diloco.UserError, match="the engine is built when trainer"):
        _ = engine_of(trainer)
    fit(trainer, Module())
    with pytest.raises(diloco.UserError, match="this engine has trained already: make a new Trainer"):
        fit(trainer, Module())
    plain = pl.Trainer(default_root_dir=f"{tmp_path}/plain", accelerator="cpu", max_steps=1, logger=False)
    plain.fit(Module(), data(0, 32))
    (foreign,) = Path(tmp_path, "plain").rglob("*.ckpt")
    with pytest.raises(diloco.UserError, match="was saved without DiLoCoCallback: load its weights"):
        fit(trainer_of(str(tmp_path)), Module(), ckpt_path=str(foreign))


class SaveInside(pl.Callback):
    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint("inside.ckpt")


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_inside_a_validation_is_refused(tmp_path):
    trainer, module = trainer_of(str(tmp_path), SaveInside()), Module()
    with pytest.raises(diloco.UserError, match="save a checkpoint after the validation"):
        fit(trainer, module)
