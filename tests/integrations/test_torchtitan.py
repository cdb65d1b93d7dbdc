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
from diloco.auto import chosen
from diloco.engine.parameters import gathered
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


def tiny_model(large: Any) -> Any:
    """The model's config with two blocks, of a few numbers, that a CPU computes."""
    from dataclasses import replace

    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import _build_llama3_layers

    rope = replace(large.layers[0].attention.rope, dim=16, max_seq_len=16)
    layers = _build_llama3_layers(n_layers=2, dim=32, n_heads=2, hidden_dim=64, rope=rope, attn_backend="flex")
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return replace(
        large,
        dim=32,
        vocab_size=64,
        tok_embeddings=replace(large.tok_embeddings, num_embeddings=64, embedding_dim=32),
        norm=replace(large.norm, normalized_shape=32),
        lm_head=replace(large.lm_head, in_features=32, out_features=64),
        layers=layers,
    )


def tiny() -> Any:
    """The config function: that of the docs, with a model, data and a validator of a few numbers."""
    from dataclasses import dataclass, replace

    from docs.snippets.torchtitan_run import debugmodel
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import Configurable

    class CountingTokens(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config): ...

        def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **kwargs: Any):
            every = {"snapshot_every_n_steps": kwargs["snapshot_every_n_steps"] or 1}
            super().__init__(Tokens(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size, **every)

    class NoTokenizer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config): ...

        def __init__(self, config: Any, *, tokenizer_path: str) -> None: ...

    class HeldOut(Configurable):
        """A validator that keeps the loss of a held-out batch."""

        @dataclass(kw_only=True, slots=True)
        class Config(Validator.Config): ...

        def __init__(self, config: Any, **_: Any) -> None:
            self.losses: list[float] = []

        def should_validate(self, step: int) -> bool:
            return step % 3 == 0

        def validate(self, model_parts: list[Any], step: int) -> None:
            inputs, labels = next(iter(Tokens(99)))
            with torch.no_grad():
                logits = model_parts[0](inputs["input"][None])[0]
                self.losses.append(torch.nn.functional.cross_entropy(logits, labels).item())

    config = debugmodel()
    config.model_spec = replace(
        config.model_spec, name="tiny", flavor="tiny", model=tiny_model(config.model_spec.model)
    )
    config.loss = CrossEntropyLoss.Config(global_vocab_size=64)
    config.dataloader, config.validator = CountingTokens.Config(), HeldOut.Config(enable=True)
    config.tokenizer = NoTokenizer.Config()
    return config


def trainer_of(folder: str, *arguments: str) -> Any:
    importlib.import_module(ON_CPU)
    from torchtitan.config import ConfigManager

    words = {
        "--module": __name__,
        "--config": "tiny",
        "--dump_folder": folder,
        "--parallelism.spmd_backend": "partial_dtensor",  # the default does not shard on torch 2.14
        "--training.seq_len": 16,
        "--training.local_batch_size": 2,
        "--training.global_batch_size": 4,
        "--training.steps": STEPS,
        "--training.mixed_precision_param": "float32",
        "--checkpoint.interval": SAVED_EVERY,
        "--optimizer.implementation": "for-loop",
        "--diloco.timeout_seconds": 30,
        "--diloco.sync_every": 4,
        "--diloco.overlap_steps": 2,
        "--diloco.layers_per_fragment": 1,
    }
    flat = [str(word) for pair in words.items() for word in pair]
    trainer = ConfigManager().parse_args([*flat, "--training.disable_cuda_graphs", *arguments]).build()
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
    trainer = trainer_of(folder, "--checkpoint.async_mode=async")
    trainer.train()
    engine = trainer.engine

    model = trainer.model_parts[0]
    shipped = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    torch.distributed.checkpoint.load(shipped, checkpoint_id=f"{folder}/checkpoint/step-{STEPS}")
    model.load_state_dict(shipped)  # which joins q, k and v

    meet_at(ports[2])
    undisturbed = trainer_of(f"{folder}/undisturbed", "--checkpoint.no-enable", "--validator.no-enable")
    undisturbed.train()

    meet_at(ports[3])
    start = f"--checkpoint.initial_load_path={folder}/checkpoint/step-{STEPS}"
    again = trainer_of(f"{folder}/again", start, "--training.steps=1")
    again.train()
    return {
        "hash": engine.outer_hash(),
        "num_steps": engine.num_steps,
        "shipped": parameters_hash(dict(model.named_parameters()), gathered),
        "undisturbed": undisturbed.engine.outer_hash(),
        "losses": trainer.validator.losses,
        "again": again.engine.outer_hash(),
    }


def train_one_of_two(folder: str, replica: int, rank: int, ports: list[int]) -> dict[str, Any]:
    """One of the two processes of a replica: FSDP2, and a resume; then one replica with tensor parallelism."""
    os.environ |= {"DILOCO_REPLICA": str(replica), "MASTER_PORT": str(ports[replica])}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    folder = f"{folder}/fsdp-{replica}"
    meet_at(ports[2])
    first = trainer_of(folder, "--training.local_batch_size=1", "--training.steps=7")
    batches = first.batch_generator(first.dataloader)
    for first.step in range(1, 6):  # a fragment is in flight then
        first.train_step(batches)
    first.checkpointer.interval = 5
    first.checkpointer.save(5)
    for first.step in range(6, 8):
        first.train_step(batches)

    meet_at(ports[3])
    second = trainer_of(folder, "--training.local_batch_size=1", "--training.steps=7")
    second.train()
    shipped = {name: p.full_tensor() for name, p in second.model_parts[0].named_parameters()}
    outer = {name: value.full_tensor() for name, value in second.engine.outer_parameters().items()}
    results = {
        "hashes": [first.engine.outer_hash(), second.engine.outer_hash()],
        "in_place": parameters_hash(shipped) == parameters_hash(outer),
        "losses": second.validator.losses,
    }
    if replica == 1:
        return results
    os.environ["DILOCO_NUM_REPLICAS"] = "1"  # of two processes
    flags = ["--parallelism.tensor_parallel_degree=2", "--checkpoint.no-enable", "--validator.no-enable"]
    flags += ["--diloco.outer=auto"]
    tensor_parallel = trainer_of(folder, *flags, "--training.global_batch_size=2", "--training.steps=5")
    untrained = tensor_parallel.engine.outer_hash()
    tensor_parallel.train()
    rule = tensor_parallel.engine.settings.outer
    assert (rule.lr, rule.momentum) == chosen(5 // 4, 1, 4, 0.5), "by training.steps"
    return results | {"tensor_parallel": [untrained, tensor_parallel.engine.outer_hash()]}


def refuse_contradictions(folder: str) -> None:
    """Give settings that contradict the engine."""

    def refused(message: str, *arguments: str) -> None:
        with pytest.raises(diloco.UserError, match=message):
            trainer_of(folder, *arguments)

    refused("pipeline_parallel_degree=2 cuts the model", "--parallelism.pipeline_parallel_degree=2")
    refused("debug.seed=none starts replicas from different weights: set it", "--debug.seed=None")
    from diloco.integrations.torchtitan import DiLoCo, DiLoCoTrainer, with_diloco

    with pytest.raises(diloco.UserError, match=r"a DiLoCoTrainer\.Config, of another Trainer: derive"):
        with_diloco(DiLoCoTrainer.Config(), DiLoCo())


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


def test_two_replicas_with_fsdp_resume_and_one_trains_with_tensor_parallelism(trained):
    results = trained[2:6]
    untrained, outer_hash = results[0].pop("tensor_parallel")
    assert results[1].pop("tensor_parallel") == [untrained, outer_hash] and untrained != outer_hash
    assert all(result == results[0] for result in results)
    assert results[0]["in_place"] and len(results[0]["losses"]) == 1
    first, resumed = results[0]["hashes"]
    assert first == resumed


def test_settings_that_contradict_the_engine_are_refused(trained):
    assert trained[6] is None, "it ended without an error"
