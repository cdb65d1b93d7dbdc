"""The mean loss of all replicas, in a run and after a resume."""

from dataclasses import asdict
from pathlib import Path

import pytest
from tests.engine.cases import exchange
from tests.processes import run_replicas
from tests.training.cases import begin, narrow, tokens_of, world_on_cpu

from diloco.training.config.config import DilocoConfig, TrainConfig
from diloco.training.loop import end_step
from diloco.training.records.checkpoints import Checkpoints
from diloco.training.records.metrics import MeanLoss
from diloco.training.state import TrainState, initial_state
from diloco.training.world import World

LAST = 16
SAVED = (4, 7, 9, 14)
"""Before any send; where one was sent; where one replica has merged what the other has not; near the end."""


def means(losses: list[list[float]]) -> list[float | None]:
    """The means of two syncs, sent after steps 2 and 4, of which both are in flight together."""
    transport = exchange()
    mean_loss = MeanLoss(transport, max_overlap=3)
    for step, loss in enumerate(losses[transport.replica], start=1):
        mean_loss.add(loss)
        if step % 2 == 0:
            mean_loss.send(step)
    return [mean_loss.receive(1), mean_loss.receive(2), mean_loss.receive(4), mean_loss.receive(4)]


def test_replicas_average_their_losses_since_the_last_sync():
    losses = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [0.1, 0.1, 0.1, 0.1]]
    first, second = (1.5 + 15 + 0.1) / 3, (3.5 + 35 + 0.1) / 3
    for result in run_replicas(means, 3, losses):
        assert result == [None, pytest.approx(first), pytest.approx(second), None]


def fresh() -> tuple[TrainConfig, World, TrainState]:
    """Replicas that merge 1 and 4 steps after a send: after steps 5, 6, 8, 10, 11, 13 and 15."""
    diloco = DilocoConfig(sync_every=5, layers_per_fragment=1, overlap_steps=(1, 4))
    config = narrow(diloco=diloco, num_tokens=LAST * 8 * 64)
    world = world_on_cpu(config)
    return config, world, initial_state(config, world)


def advance(config: TrainConfig, world: World, state: TrainState, *saved: Checkpoints) -> list[dict]:
    """The metrics of the steps that are left, but for times."""
    measured = []
    while not state.is_over:
        tokens = tokens_of(config, config.process_batch, state.step, world.replica)
        metrics = asdict(end_step(begin(state, tokens, config, world), state, world, since=0.0))
        measured.append({name: metrics[name] for name in ("step", "loss", "mean_loss", "bytes_sent")})
        for checkpoints in saved if state.step in SAVED else ():
            state.save(checkpoints)
    return measured


def undisturbed_and_resumed(folder: Path) -> list[tuple[list[dict], str]]:
    """The metrics and the outer hash of a run, and of its resumes."""
    config, world, state = fresh()
    checkpoints = Checkpoints(folder, world.replica, world.host_group, keep=len(SAVED))
    runs = [(advance(config, world, state, checkpoints), state.synchronizer.outer_hash())]
    checkpoints.wait()
    for step in SAVED:
        config, world, state = fresh()
        state.load(checkpoints, step)
        runs.append((advance(config, world, state), state.synchronizer.outer_hash()))
    return runs


@pytest.mark.slow
def test_a_resumed_run_has_the_mean_losses_of_an_undisturbed_one(tmp_path):
    for replica, runs in enumerate(run_replicas(undisturbed_and_resumed, 2, tmp_path)):
        (whole, outer_hash), *resumed = runs
        merged = {min(sent + (1, 4)[replica], LAST) for sent in (5, 6, 8, 10, 11, 13, 15)}
        assert {line["step"] for line in whole if line["mean_loss"] is not None} == merged
        for step, run in zip(SAVED, resumed, strict=True):
            assert run == (whole[step:], outer_hash)
