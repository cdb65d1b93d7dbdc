"""torchtitan: two replicas, each with a Trainer of its own, on a tiny Llama."""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from tests.integrations.jobs import assert_resumed, die, is_killed, meet_at
from tests.ports import free_port
from tests.processes import run_replicas

import diloco
from diloco.outer.digest import parameters_hash

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ON_CPU = "tests.integrations.on_cpu"
STEPS, SAVED_EVERY, KILLED_AT = 14, 3, 11
"""The last checkpoint is then that of step 9, in which fragments are in flight."""


class Tokens(torch.utils.data.IterableDataset):
    """Tokens that count upwards from a random one; it resumes where it was."""

    def __init__(self, seed: int) -> None:
        self.seed, self.num_rows = seed, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.seed + self.num_rows)
            row = (torch.randint(64, (1,), generator=generator) + torch.arange(17)) % 64
            self.num_rows += 1
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, int]:
        return {"num_rows": self.num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_rows = state["num_rows"]


def dataloader(*, dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> Any:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    size = job_config.training.local_batch_size
    return ParallelAwareDataloader(Tokens(dp_rank), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=size)


class Validator:
    """A validator that keeps the loss of a held-out batch"""

    def __init__(self, **_: Any) -> None:
        self.losses: list[float] = []

    def should_validate(self, step: int) -> bool:
        return step % 3 == 0

    def validate(self, model_parts: list[Any], step: int) -> None:
        inputs, labels = next(iter(Tokens(99)))
        with torch.no_grad():
            logits = model_parts[0](inputs["input"][None])[0]
            self.losses.append(torch.nn.functional.cross_entropy(logits, labels).item())


def trainer_of(folder: str, *arguments: str) -> Any:
    importlib.import_module(ON_CPU)
    import dataclasses

    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols import train_spec

    from diloco.integrations.torchtitan import DiLoCoTrainer

    if "tiny" not in train_spec._extra_train_specs:
        tiny = dataclasses.replace(
            get_train_spec(),
            model_args={"tiny": TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=64)},
            build_dataloader_fn=dataloader,
            build_tokenizer_fn=None,
            build_validator_fn=Validator,
        )
        train_spec.register_train_spec("tiny", tiny)
    words = {
        "--job.config_file": ROOT / "docs" / "snippets" / "torchtitan.toml",
        "--job.dump_folder": folder,
        "--model.name": "tiny",
        "--model.flavor": "tiny",
        "--training.seq_len": 16,
        "--training.local_batch_size": 2,
        "--training.global_batch_size": 4,
        "--training.steps": STEPS,
        "--checkpoint.interval": SAVED_EVERY,
        "--optimizer.implementation": "for-loop",
        "--lr_scheduler.warmup_steps": 2,
        "--diloco.timeout_seconds": 30,
        "--diloco.sync_every": 4,
        "--diloco.overlap_steps": 2,
        "--diloco.layers_per_fragment": 1,
    }
    flat = [str(word) for pair in words.items() for word in pair]
    trainer = DiLoCoTrainer(ConfigManager().parse_args([*flat, *arguments]))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can't scale in a reduction
    return trainer


def train_and_be_killed(folder: str) -> None:
    trainer = trainer_of(folder)
    train_step = trainer.train_step

    def train_step_and_die(data: Any) -> None:
        train_step(data)
        if trainer.step == KILLED_AT:
            die()

    trainer.train_step = train_step_and_die
    trainer.train()


def train(folder: str, ports: list[int]) -> dict[str, Any] | None:
    """Numbers 0 and 1 are replicas of a process each, 2 to 5 two of two processes, and 6 is refused."""
    warnings.simplefilter("ignore")
    number = int(os.environ["DILOCO_REPLICA"])
    os.environ |= {"DILOCO_NUM_REPLICAS": "2", "MASTER_ADDR": "127.0.0.1"}
    if number < 2:
        return train_replica(f"{folder}/replica-{number}", ports[:4])
    if number == 6:
        return refuse_contradictions(f"{folder}/refused")
    return train_one_of_two(folder, *divmod(number - 2, 2), ports[4:])


def train_replica(folder: str, ports: list[int]) -> dict[str, Any]:
    """A run that is killed and resumed, and then the same run undisturbed."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    is_killed(train_and_be_killed, folder, port=ports[0])

    meet_at(ports[1])
    os.environ["MASTER_PORT"] = str(free_port())
    trainer = trainer_of(folder)
    trainer.train()
    engine = trainer.engine

    shipped = {name: torch.zeros_like(value) for name, value in trainer.model_parts[0].state_dict().items()}
    torch.distributed.checkpoint.load(shipped, checkpoint_id=f"{folder}/checkpoint/step-{STEPS}")

    meet_at(ports[2])
    undisturbed = trainer_of(f"{folder}/undisturbed", "--checkpoint.no-enable", "--validation.no-enable")
    undisturbed.train()

    meet_at(ports[3])
    start = f"--checkpoint.initial_load_path={folder}/checkpoint/step-{STEPS}"
    again = trainer_of(f"{folder}/again", start, "--training.steps=1")
    again.train()
    return {
        "hash": engine.outer_hash(),
        "num_steps": engine.num_steps,
        "shipped": parameters_hash({name: shipped[_unwrapped(name)] for name in engine.outer_parameters()}),
        "undisturbed": undisturbed.engine.outer_hash(),
        "losses": trainer.validator.losses,
        "again": again.engine.outer_hash(),
    }


def _unwrapped(name: str) -> str:
    """The name in a state_dict, from which activation checkpointing leaves itself out."""
    return name.replace("_checkpoint_wrapped_module.", "")


def train_one_of_two(folder: str, replica: int, rank: int, ports: list[int]) -> dict[str, Any]:
    """One of the two processes of a replica with FSDP2 inside: five steps, and the others after a resume."""
    os.environ |= {"DILOCO_REPLICA": str(replica), "MASTER_PORT": str(ports[replica])}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    folder = f"{folder}/fsdp-{replica}"
    meet_at(ports[2])
    first = trainer_of(folder, "--training.local_batch_size=1", "--training.steps=9")
    batches = first.batch_generator(first.dataloader)
    for first.step in range(1, 6):  # a fragment is in flight then
        first.train_step(batches)
    first.checkpointer.interval = 5
    first.checkpointer.save(5)
    for first.step in range(6, 10):
        first.train_step(batches)

    meet_at(ports[3])
    second = trainer_of(folder, "--training.local_batch_size=1", "--training.steps=9")
    second.train()
    shipped = {name: p.full_tensor() for name, p in second.model_parts[0].named_parameters()}
    outer = {name: value.full_tensor() for name, value in second.engine.outer_parameters().items()}
    return {
        "hashes": [first.engine.outer_hash(), second.engine.outer_hash()],
        "in_place": parameters_hash(shipped) == parameters_hash(outer),
        "losses": second.validator.losses,
    }


def refuse_contradictions(folder: str) -> None:
    """Give settings that contradict the engine."""

    def refused(message: str, *arguments: str) -> None:
        with pytest.raises(diloco.UserError, match=message):
            trainer_of(folder, *arguments)

    refused("fault_tolerance.enable=true joins the replicas by torchft", "--fault_tolerance.enable")
    refused(
        "precompute_float8_dynamic_scale_for_fsdp=true computes scales before a merge",
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    )
    refused("pipeline_parallel_degree=2 cuts the model", "--parallelism.pipeline_parallel_degree=2")
    refused("debug.seed=none starts replicas from different weights: set it", "--debug.seed=None")
    from torchtitan.config import JobConfig

    from diloco.integrations.torchtitan import DiLoCoTrainer

    with pytest.raises(diloco.UserError, match=r"set job\.custom_config_module to diloco"):
        DiLoCoTrainer(JobConfig())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of seven processes, which find torchtitan imported: to import it takes longer than to train."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    arguments = (str(tmp_path_factory.mktemp("replicas")), [free_port() for _ in range(8)])
    return run_replicas(train, 7, *arguments, joined=False, timeout_seconds=150, imports=[ON_CPU])


def test_two_replicas_are_killed_and_resume(trained):
    results = trained[:2]
    assert_resumed(results, STEPS)
    for result in results:
        assert result["again"] == result["hash"], "weights that are loaded alone become Θ"
    first, second = results
    assert len(first["losses"]) == 1 and first["losses"] == second["losses"], "the replicas share Θ"


def test_two_replicas_of_two_processes_with_fsdp_resume(trained):
    results = trained[2:6]
    assert all(result == results[0] for result in results)
    assert results[0]["in_place"] and len(results[0]["losses"]) == 2
    first, resumed = results[0]["hashes"]
    assert first == resumed


def test_settings_that_contradict_the_engine_are_refused(trained):
    assert trained[6] is None, "it ended without an error"
