"""A replica's state, saved on one number of shards and taken up on another; and how far a run is."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas
from tests.training.cases import narrow, resolved, share_of, tokens_of, world_on_cpu

from diloco.engine.parameters import gathered
from diloco.outer.digest import parameters_hash
from diloco.schedule import Schedule
from diloco.training.config.config import DilocoConfig, OptimizerConfig, TrainConfig
from diloco.training.loop import inner_step
from diloco.training.records.checkpoints import Checkpoints
from diloco.training.state import ElasticProgress, Standing, TrainState, initial_state
from diloco.training.world import World

M = 2
SAVED, LAST = 5, 8


def config_of(
    S: int,
    wire: str,
    combine: str,
    D: int = 1,
    tensor_parallel: int = 1,
    optimizer: str = "adamw",
    num_replicas: int = M,
) -> TrainConfig:
    overlap = (1, 2)[-num_replicas:]
    diloco = DilocoConfig(sync_every=3, layers_per_fragment=1, overlap_steps=overlap, wire=wire, combine=combine)
    return narrow(
        num_replicas=num_replicas,
        shards_per_replica=S,
        tensor_parallel=tensor_parallel,
        ddp_per_replica=D,
        diloco=diloco,
        optimizer=OptimizerConfig(name=optimizer),
        num_tokens=LAST * 8 * 64,
    )


def begin(config: TrainConfig, folder: Path) -> tuple[World, TrainState, Checkpoints]:
    world = world_on_cpu(config)
    return world, initial_state(config, world), Checkpoints(folder, world.replica, world.host_group, keep=1)


def advance(state: TrainState, config: TrainConfig, world: World, last: int) -> list[float]:
    losses = []
    for step in range(state.step + 1, last + 1):
        losses.append(inner_step(state, share_of(config, world, step), world, 1e-3)[0])
        state.synchronizer.step()
        state.step = step
    return losses


def contents(state: TrainState) -> tuple[str, list]:
    """A hash of every tensor of the replica, whole, and what is in flight."""
    sync = state.synchronizer.state_dict()
    tensors = {
        f"{kind} {name}": value
        for kind in ("outer", "velocity", "error", "sent")
        for name, value in sync[kind].items()
    }
    for name, parameter in state.model.named_parameters():
        tensors[f"model {name}"] = parameter
        tensors |= {f"{kind} {name}": value for kind, value in state.optimizer.state[parameter].items()}
    return parameters_hash({name: gathered(tensor).reshape(-1) for name, tensor in tensors.items()}), sync[
        "in_flight"
    ]


def save(S: int, wire: str, combine: str, folder: Path, *others: Any) -> tuple:
    config = config_of(S, wire, combine, *others)
    world, state, checkpoints = begin(config, folder)
    advance(state, config, world, SAVED)
    state.save(checkpoints)
    saved = contents(state)
    losses = advance(state, config, world, LAST)
    checkpoints.wait()
    state.synchronizer.finish()
    return saved, losses, state.synchronizer.outer_hash()


def resume(S: int, wire: str, combine: str, folder: Path, *others: Any) -> tuple:
    config = config_of(S, wire, combine, *others)
    world, state, checkpoints = begin(config, folder)
    state.load(checkpoints, SAVED)
    saved = contents(state)
    losses = advance(state, config, world, LAST)
    state.synchronizer.finish()
    return saved, losses, state.synchronizer.outer_hash()


def copy(S: int, wire: str, combine: str, folder: Path, *others: Any) -> tuple:
    """Resume; what was loaded is saved again, in a folder in this one."""
    config = config_of(S, wire, combine, *others)
    world, state, checkpoints = begin(config, folder)
    state.load(checkpoints, SAVED)
    with Checkpoints(folder / "copy", world.replica, world.host_group, keep=1) as copies:
        state.save(copies)
    saved = contents(state)
    losses = advance(state, config, world, LAST)
    state.synchronizer.finish()
    return saved, losses, state.synchronizer.outer_hash()


def run_all(calls: list[tuple]) -> list[tuple]:
    """Functions and their arguments, one after another in the same processes, which have started once for all."""
    results = []
    for function, *arguments in calls:
        results.append(function(*arguments))
        dist.barrier()  # the first process writes the checksums of a checkpoint last
    return results


def results_of(num_processes: int, *calls: tuple, imports: Sequence[str] = ()) -> list[list[tuple]]:
    """The results of all processes, by call."""
    results = run_replicas(run_all, num_processes, [*calls], timeout_seconds=120, imports=imports)
    return [*zip(*results, strict=True)]


def check_resumed(resumed: list[tuple], saved: list[tuple], *, is_same: bool, tolerance: float) -> None:
    """Compare processes that went on with those that saved; losses differ by the order of sums."""
    for rank, (loaded, losses, outer_hash) in enumerate(resumed):
        expected, expected_losses, expected_hash = saved[rank * len(saved) // len(resumed)]
        assert loaded == expected and outer_hash == resumed[0][2]
        assert losses == pytest.approx(expected_losses, abs=tolerance)
        if is_same:
            assert (losses, outer_hash) == (expected_losses, expected_hash)


def assert_in_flight(saved: list[tuple]) -> None:
    assert saved[0][0] != saved[-1][0], "replicas that have drifted apart are not mixed"
    assert saved[-1][0][1] == [[1, 1, 4], [2, 1, 5]], "fragments are in flight"


@pytest.mark.slow
def test_a_state_is_taken_up_on_shards_and_by_processes_that_share_a_batch(tmp_path):
    """The latter by DistributedDataParallel inside the replicas, whose first processes exchange for all."""
    whole = 1, "fp32", "gather", tmp_path
    (saved,) = results_of(M, (save, *whole))
    shards, sharing = results_of(2 * M, (resume, 2, *whole[1:]), (resume, *whole, 2))
    assert_in_flight(saved)
    for resumed in (shards, sharing):
        check_resumed(resumed, saved, is_same=False, tolerance=1e-5)


@pytest.mark.slow
def test_the_state_of_shards_is_taken_up_on_any_number_of_shards(tmp_path):
    ways = "e3m0", "reduce_scatter:bf16", tmp_path
    saved, again = results_of(2 * M, (save, 2, *ways), (resume, 2, *ways))
    (whole,) = results_of(M, (resume, 1, *ways))
    assert_in_flight(saved)
    check_resumed(again, saved, is_same=True, tolerance=0)
    check_resumed(whole, saved, is_same=False, tolerance=0.02)


MESHES = {"one": (1, 1, 1), "both": (4, 1, 2), "hsdp": (2, 2, 1)}
"""S, D and tensor_parallel."""


def on(mesh: str, function: Callable, folder: Path) -> tuple:
    """A call for a replica alone on a mesh, with an optimizer that needs whole matrices."""
    S, D, tensor_parallel = MESHES[mesh]
    return function, S, "fp32", "gather", folder, D, tensor_parallel, "muon", 1


@pytest.mark.slow
def test_a_state_is_taken_up_on_another_mesh(tmp_path):
    saved, copied = results_of(4, on("hsdp", save, tmp_path), on("both", copy, tmp_path))
    check_resumed(copied, saved, is_same=False, tolerance=1e-4)
    (resumed,) = results_of(1, on("one", resume, tmp_path / "copy"))
    check_resumed(resumed, saved[:1], is_same=False, tolerance=1e-4)


def train_alone(S: int, also_compiled: bool, tensor_parallel: int = 1) -> tuple[list[float], str]:
    """Losses and outer hash; compiled, the first losses are the same."""
    config = config_of(S, "fp32", "gather", tensor_parallel=tensor_parallel)
    config = resolved(config, num_replicas=1, micro_batch=None)
    # One layer: half of what is compiled.
    model = replace(config.model, num_layers=1)
    config = replace(config, model=model, diloco=replace(config.diloco, overlap_steps=2))
    world, state, _ = begin(config, Path())
    losses = advance(state, config, world, LAST)
    state.synchronizer.finish()
    if also_compiled:
        warnings.simplefilter("ignore")  # of the compiler's own modules
        # Traced and differentiated, which is what sharding may break; C++ of it would take half a minute.
        torch.compiler.reset()
        with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
            world, compiled, _ = begin(replace(config, compile=True), Path())
        assert advance(compiled, config, world, 3) == pytest.approx(losses[:3], abs=1e-3)
    return losses, state.synchronizer.outer_hash()


@pytest.mark.slow
def test_a_replica_alone_may_be_sharded_and_compiled():
    (expected, _), *_ = run_replicas(train_alone, 1, 1, False)
    calls, compiler = ((train_alone, 2, True), (train_alone, 2, True, 2)), ["torch._inductor.compile_fx"]
    for sharded in results_of(2, *calls, imports=[*compiler, "functorch.compile"]):
        for losses, outer_hash in sharded:
            assert losses == pytest.approx(expected, abs=1e-5)
            assert outer_hash == sharded[0][1]


def train_the_next_fragment_alone() -> list[tuple[set[int], set[int]]]:
    """The fragments whose parameters changed at each step, and those that the schedule sends next."""
    config = config_of(1, "fp32", "gather")
    config = replace(config, diloco=replace(config.diloco, freeze=True, overlap_steps=1))
    world, state, _ = begin(config, Path())
    trained = []
    for step in range(1, LAST + 1):
        tokens = tokens_of(config, config.process_batch, step, world.replica)
        before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
        inner_step(state, tokens, world, 1e-3)
        changed = {
            index
            for index, fragment in enumerate(state.synchronizer.settings.fragments)
            if any(not torch.equal(before[n], state.model.get_parameter(n)) for n in fragment.parameters)
        }
        trained.append((changed, set(state.synchronizer.settings.schedule.next_sent(step))))
        state.synchronizer.step()
        state.step = step
    return trained


def test_only_the_fragment_that_is_sent_next_is_trained():
    for trained in run_replicas(train_the_next_fragment_alone, M):
        assert all(changed == due for changed, due in trained)
        assert {frozenset(due) for _, due in trained} == {frozenset({p}) for p in range(3)}


def elastic_progress(num_others: int, budget: int) -> tuple[ElasticProgress, SimpleNamespace, list[int]]:
    """Progress of one of several replicas with 3 fragments; the engine that it looks at; its questions."""
    own_tokens = resolved(num_replicas=1).tokens_per_step
    settings = SimpleNamespace(
        fragments=(None,) * 3, schedule=Schedule(num_fragments=3, sync_every=6, overlap_steps=1)
    )
    engine = SimpleNamespace(settings=settings, num_steps=0, _membership=SimpleNamespace(uncounted_tokens=0.0))
    run = SimpleNamespace(active=range(1 + num_others), finished=False)
    rendezvous = SimpleNamespace(state=run, counted=(0, 0))
    questions = []

    def broadcast_numbers(numbers):
        questions.append(len(numbers))
        return list(map(int, numbers))

    world = SimpleNamespace(
        rendezvous=rendezvous, group=SimpleNamespace(index=0, broadcast_numbers=broadcast_numbers)
    )
    return ElasticProgress(engine, world, num_tokens=budget * own_tokens, own_tokens=own_tokens), engine, questions


def test_replicas_that_come_and_go_know_tokens_rate_and_end_of_one_question():
    progress, engine, questions = elastic_progress(num_others=2, budget=6)
    per_step = resolved(num_replicas=1).tokens_per_step
    seen = []
    for step in (1, 2):
        engine.num_steps, engine._membership.uncounted_tokens = step, float(step * per_step)
        seen.append(progress.after(step))
    assert questions == [3, 3]
    assert seen == [Standing(3 * per_step, 6 * per_step, False), Standing(6 * per_step, 9 * per_step, True)]
    progress._rendezvous.state.active = range(1)
    assert progress.after(2) == seen[1], "it never goes back when replicas leave"
