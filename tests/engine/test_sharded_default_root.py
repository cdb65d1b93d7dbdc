"""FSDP2's default, which keeps the outermost module's parameters gathered after a pass without a backward."""

import pytest
import torch
from tests.engine.test_sharded import M, loss_of, processes, windows
from tests.processes import run_replicas
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.models.decoder_config import DecoderConfig

NUM_STEPS, MERGED = 10, (6, 10)
"""The steps after which the one fragment is merged."""


def train(evaluated: tuple[int, ...], reshard_after_forward: bool | None, built_gathered: bool = False) -> str:
    """The hash of Θ and the last loss, with evaluations between an inner step and the engine's."""
    mesh = processes(2)
    model = DecoderConfig(num_layers=2, num_heads=2, width=32, vocab_size=65).build(seed=0)
    fully_shard(model.blocks[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=reshard_after_forward)
    if built_gathered:
        with torch.no_grad():
            loss_of(model, windows(1), mesh)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=4, num_fragments=1, overlap_steps=2),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, NUM_STEPS + 1):
        loss, mean = loss_of(model, windows(seed=100 * engine.exchange.replica + step), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in evaluated:
            with torch.no_grad():
                loss_of(model, windows(seed=12345), mesh)
        engine.step()
    return f"{engine.outer_hash()} {mean.hex()}"


def train_in_all_ways() -> list[str]:
    every_step = tuple(range(1, NUM_STEPS + 1))
    return [
        train((), reshard_after_forward=True),
        train(every_step, reshard_after_forward=None),
        train(MERGED, reshard_after_forward=None, built_gathered=True),
    ]


@pytest.mark.slow
def test_parameters_that_are_kept_gathered_change_no_bit():
    for expected, *others in run_replicas(train_in_all_ways, M * 2):
        assert others == [expected] * 2
