"""Ray Train on two sites: each site runs a TorchTrainer, which is one replica.

python examples/ray_train.py --replica 0 --address 10.0.0.1:29500
python examples/ray_train.py --replica 1 --address 10.0.0.1:29500
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

import diloco
from diloco.integrations.ray import common_checkpoint


def batch_of(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This replica's batch of a step: y = 2 x + 1."""
    inputs = torch.rand(32, 1, generator=torch.Generator().manual_seed(1_000_000 * replica + step))
    return inputs, 2 * inputs + 1


# --8<-- [start:loop]
def train_loop_per_worker(config: dict[str, Any]) -> None:
    torch.manual_seed(0)  # all replicas start from the same weights
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    prepared = ray.train.torch.prepare_model(model)  # DDP, where this replica has several workers
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    exchange = diloco.connect(
        config["address"], replica=config["replica"], num_replicas=config["num_replicas"], leader=True
    )
    engine = diloco.StreamingDiLoCo(model, fragments="whole", sync_every=4, overlap_steps=2, exchange=exchange)
    engine.attach(optimizer)
    if checkpoint := common_checkpoint(exchange):
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        engine.load_state_dict(saved["engine"])

    for step in range(engine.num_steps + 1, config["num_steps"] + 1):
        inputs, targets = batch_of(config["replica"], step)
        loss = torch.nn.functional.mse_loss(prepared(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % config["save_every"] == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "engine": engine.state_dict(),
            }
            report({"loss": loss.item(), "num_steps": step}, state)
    engine.finish()
    metrics = {"num_steps": engine.num_steps, "outer_hash": engine.outer_hash()}
    engine.copy_outer_to_model()  # the last checkpoint holds Θ
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}
    report(metrics, state)


def report(metrics: dict[str, Any], state: dict[str, Any]) -> None:
    """Report metrics, and a checkpoint by the first worker of this replica."""
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, "state.pt"))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


# --8<-- [end:loop]


# --8<-- [start:fit]
def fit(config: dict[str, Any], storage_path: str, num_workers: int = 1) -> ray.train.Result:
    trainer = ray.train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 0.1, "num_replicas": 2, "num_steps": 14, "save_every": 3, **config},
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            name=f"replica-{config['replica']}",
            storage_path=storage_path,
            failure_config=ray.train.FailureConfig(max_failures=10),  # all replicas restart when one fails
        ),
    )
    return trainer.fit()


# --8<-- [end:fit]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1:29500", help="host:port of replica 0")
    parser.add_argument("--storage-path", default=str(Path.home() / "ray_results"))
    arguments = parser.parse_args()
    result = fit({"replica": arguments.replica, "address": arguments.address}, arguments.storage_path)
    assert result.metrics is not None
    print(f"replica {arguments.replica}: outer hash {result.metrics['outer_hash']}")
