"""Replicas of several processes: FSDP2 inside each, and the engine on local shards."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.processes import run_replicas
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.engine.parameters import gathered, local
from diloco.models.decoder_config import DecoderConfig
from diloco.models.language_model import cross_entropy
from diloco.outer.digest import parameters_hash
from diloco.schedule import Sync

M = 2
NUM_STEPS, BATCH, LENGTH, VOCAB = 12, 6, 32, 65  # 65 rows are cut into 33 and 32


def processes(S: int) -> DeviceMesh:
    """M replicas of S processes; those beyond have no coordinate in it."""
    return DeviceMesh("cpu", torch.arange(M * S).view(M, S), mesh_dim_names=("replica", "shard"))


def sharded(model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh) -> nn.Module:
    if mesh.shape[1] > 1:
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["shard"], reshard_after_forward=True)
    return model


def decoder(mesh: DeviceMesh) -> nn.Module:
    model = DecoderConfig(num_layers=2, num_heads=2, width=32, vocab_size=VOCAB).build(seed=0)
    return sharded(model, model.blocks, mesh)


def windows(seed: int) -> torch.Tensor:
    """Sequences that count up in steps of 1 to 3, which a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % VOCAB


def loss_of(model: nn.Module, window: torch.Tensor, mesh: DeviceMesh) -> tuple[torch.Tensor, float]:
    """This process's loss on its share of the sequences, and the replica's on all of them."""
    share = window.chunk(mesh.shape[1])[mesh.get_local_rank("shard")]
    loss, _ = cross_entropy(model(share[:, :-1]).flatten(0, 1), share[:, 1:].flatten(), 0.0)
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.get_group("shard"))
    return loss, mean.item() / mesh.shape[1]


def engine_of(model: nn.Module, mesh: DeviceMesh, **settings: object) -> diloco.StreamingDiLoCo:
    fragments = diloco.strided(model, layers_per_fragment=1)
    return diloco.StreamingDiLoCo(
        model,
        fragments=fragments,
        schedule=diloco.Schedule(sync_every=6, num_fragments=len(fragments), overlap_steps=(1, 4)),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
        **settings,
    )


def train(S: int, wire: str, outer: str = "nesterov") -> tuple | None:
    """The replica's losses, the held-out loss of Θ, its hash, and what an outer step tells; None if beyond."""
    mesh = processes(S)
    if mesh.get_coordinate() is None:
        return None
    model = decoder(mesh)
    engine = engine_of(model, mesh, wire=wire, outer=outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, outer_steps = [], []
    for step in range(1, NUM_STEPS + 1):
        loss, mean = loss_of(model, windows(seed=100 * engine.exchange.replica + step), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer_steps += engine.step()
        losses.append(mean)
    outer_steps += engine.finish()
    messages = [(o.norm(), o.mean_cosine(), o.successive_cosine()) for o in outer_steps]
    with torch.no_grad():
        for name, parameter in engine.outer_parameters().items():
            local(model.get_parameter(name)).copy_(local(parameter))
        held_out = loss_of(model, windows(seed=12345), mesh)[1]
    return losses, held_out, engine.outer_hash(), messages, (engine.bytes_sent, engine.bytes_received)


def train_all(runs: list[tuple]) -> list[tuple | None]:
    return [train(*run) for run in runs]


def results_of(runs: dict[str, tuple], by_process: list[list[tuple | None]]) -> dict[str, list[tuple]]:
    """The results of `train_all`, by run."""
    by_run = zip(*by_process, strict=True)
    return {name: [one for one in of_run if one is not None] for name, of_run in zip(runs, by_run, strict=True)}


WAYS = {
    "whole": (1, "fp32"),
    "whole in e3m0": (1, "e3m0"),
    "shards in e3m0": (2, "e3m0"),
    "whole with rda": (1, "fp32", "rda"),
    "shards with rda": (2, "fp32", "rda"),
}


def run_decoders(folder: Path) -> tuple:
    return train_all([*WAYS.values()]), train_save_and_resume(folder), evaluate_whole_and_shards()


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """The results of four processes, by function."""
    folder = tmp_path_factory.mktemp("saved")
    return [*zip(*run_replicas(run_decoders, M * 2, folder, timeout_seconds=180), strict=True)]


@pytest.fixture(scope="module")
def runs(decoders):
    """Replicas of one process, and of two shards."""
    return results_of(WAYS, decoders[0])


def assert_trained_alike(sharded: list[tuple], whole: list[tuple]) -> None:
    for rank, (losses, held_out, _, messages, _) in enumerate(sharded):
        expected = whole[rank // (len(sharded) // M)]
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert held_out == pytest.approx(expected[1], abs=1e-5)
        assert messages == [
            (pytest.approx(norm, rel=1e-3), pytest.approx(cosine, abs=1e-3), rho and pytest.approx(rho, abs=2e-3))
            for norm, cosine, rho in expected[3]
        ]
        assert messages[-1][-1] is not None, "it is the second of its fragment, or a later one"
    assert losses[-1] < losses[0] - 0.3
    assert len({outer_hash for _, _, outer_hash, _, _ in sharded}) == 1


@pytest.mark.slow
def test_shards_train_as_a_whole_replica_does(runs):
    """With a rule that needs the length of a parameter over all shards."""
    assert_trained_alike(runs["shards with rda"], runs["whole with rda"])


@pytest.mark.slow
def test_a_length_of_a_parameter_is_that_of_all_its_shards(runs):
    held_out = [runs[name][0][1] for name in ("whole", "whole with rda")]
    assert abs(held_out[0] - held_out[1]) > 1e-3, "the rules differ"


@pytest.mark.slow
def test_blocks_that_begin_anew_in_each_shard_train_as_well(runs):
    assert runs["shards in e3m0"][0][1] == pytest.approx(runs["whole in e3m0"][0][1], rel=0.005)
    assert len({outer_hash for _, _, outer_hash, _, _ in runs["shards in e3m0"]}) == 1


@pytest.mark.slow
def test_bytes_are_those_of_all_shards(runs):
    *_, (whole_sent, _) = runs["whole in e3m0"][0]
    for *_, (sent, received) in runs["shards in e3m0"]:
        assert sent == received
        # A header and a scale more for every shard's payload.
        assert whole_sent < sent < 1.05 * whole_sent


def train_and_save(S: int, folder: Path) -> str:
    """The hash of Θ after 19 steps, of a run that saves at the 15th, or goes on from there."""
    mesh = processes(S)
    model = decoder(mesh)
    engine = engine_of(model, mesh, wire="bf16", error_feedback=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    of_replica = {
        "checkpoint_id": folder / f"replica-{mesh.get_local_rank('replica')}",
        "process_group": mesh.get_group("shard"),
    }
    if of_replica["checkpoint_id"].exists():
        state = whole_state(model, optimizer, engine)
        dcp.load(state, **of_replica)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert engine.num_steps == 15
        assert engine.state_dict()["in_flight"] == [[0, 2, 12], [1, 2, 14]]
    for step in range(engine.num_steps + 1, 20):
        loss, _ = loss_of(model, windows(seed=100 * engine.exchange.replica + step), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        if step == 15:
            dcp.save(whole_state(model, optimizer, engine), **of_replica)
    engine.finish()
    return engine.outer_hash()


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: diloco.StreamingDiLoCo
) -> dict[str, object]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "engine": engine}


def train_save_and_resume(folder: Path) -> list[str]:
    """Θ of a run, and of that run resumed."""
    return [train_and_save(2, folder) for _ in range(2)]


@pytest.mark.slow
def test_a_loop_of_ones_own_saves_and_resumes(decoders):
    assert len({outer_hash for of_process in decoders[1] for outer_hash in of_process}) == 1


class OneRow(nn.Module):
    """A model whose weights have fewer rows than there are shards: some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 1, bias=False) for _ in range(2))
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                layer.weight.copy_(torch.arange(5.0) - index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)


def train_one_row() -> list[tuple[str, str]]:
    """The hash of Θ before and after training, by codec."""
    mesh, hashes = processes(2), []
    for wire in ("fp32", "e3m0", "int4", "topk:density=0.5"):
        model = OneRow()
        sharded(model, model.layers, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = diloco.StreamingDiLoCo(
            model,
            fragments=diloco.strided(model, layers_per_fragment=1),
            schedule=diloco.Schedule(sync_every=2, num_fragments=2, overlap_steps=1),
            wire=wire,
            exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
        )
        first = engine.outer_hash()
        for step in range(8):
            model(torch.full((1, 5), 1.0 + engine.exchange.replica + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
        engine.finish()
        hashes.append((first, engine.outer_hash()))
    return hashes


def start_small_models() -> tuple:
    parts = train_one_row, start_with_odd_shards, train_beside_frozen_parameters, gather, what_is_masked
    return tuple(part() for part in parts)


@pytest.fixture(scope="module")
def small_models():
    """The results of four processes, by function."""
    return [*zip(*run_replicas(start_small_models, M * 2), strict=True)]


def test_a_shard_may_be_empty(small_models):
    for before_and_after in zip(*small_models[0], strict=True):
        assert len(set(before_and_after)) == 1 and before_and_after[0][0] != before_and_after[0][1]


def start_with_odd_shards() -> list[str]:
    """The refusals of models that are sharded in other ways, and of a rule with norms over a fragment."""
    mesh = processes(2)
    messages = []
    for build, outer in ((_half_sharded, None), (_over_all, None), (_as_it_should_be, torch.optim.Adafactor)):
        model = build(mesh)
        try:
            diloco.StreamingDiLoCo(
                model,
                fragments=diloco.whole(model),
                schedule=diloco.Schedule(sync_every=2, num_fragments=1),
                exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
                outer=outer,
            )
        except diloco.UserError as error:
            messages.append(str(error))
    return messages


def _half_sharded(mesh: DeviceMesh) -> nn.Module:
    model = OneRow()
    fully_shard(model.layers[0], mesh=mesh["shard"])
    return model


def _over_all(mesh: DeviceMesh) -> nn.Module:
    model = OneRow()
    fully_shard(model, mesh=mesh)
    return model


def _as_it_should_be(mesh: DeviceMesh) -> nn.Module:
    model = OneRow()
    return sharded(model, model.layers, mesh)


def test_a_model_that_is_not_sharded_over_its_replica_is_refused(small_models):
    for half, over_all, norms in small_models[1]:
        assert "layers.1.weight is on one process" in half and "mesh=mesh['shard']" in half
        assert "a replica's mesh has no process of another replica" in over_all
        assert norms.startswith("outer=torch.optim.Adafactor computes with norms over a fragment")


def train_beside_frozen_parameters() -> str:
    """The embedding is frozen and whole, as FSDP leaves parameters that it ignores."""
    mesh = processes(2)
    model = OneRow()
    model.embedding = nn.Embedding(3, 5).requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"], ignored_params={model.embedding.weight})
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.strided(model, layers_per_fragment=1),
        schedule=diloco.Schedule(sync_every=2, num_fragments=2, overlap_steps=1),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
    )
    return engine.outer_hash()


def test_frozen_parameters_may_be_whole(small_models):
    assert len(set(small_models[2])) == 1


def gather() -> set[tuple[str, float]]:
    """A hash over the whole, and its norm, from whole tensors and from shards."""
    results = set()
    for mesh in map(processes, (1, 2)):
        if mesh.get_coordinate() is not None:
            named = dict(decoder(mesh).named_parameters())
            norm = math.sqrt(sum(gathered(p).square().sum().item() for p in named.values()))
            results.add((parameters_hash(named, gathered), norm))
    return results


def test_the_hash_does_not_depend_on_the_shards(small_models):
    assert len(set.union(*small_models[3])) == 1


def what_is_masked() -> list[int]:
    """The places that feddropout keeps of this shard's first fragment."""
    mesh = processes(2)
    model = decoder(mesh)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=1, num_fragments=1),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica")),
        wire="feddropout:density=0.1",
    )
    key, wire = engine._membership.key(Sync(0, 1, 1)), engine.settings.wire
    return wire.decode(wire.encode(torch.ones(1000), key), 1000, key).nonzero().flatten().tolist()


def test_shards_mask_other_places_and_replicas_the_same(small_models):
    first, second, *others = small_models[4]
    assert first != second and others == [first, second]


def evaluate_outer(S: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits of Θ, and of the replica's own parameters before and after; FSDP keeps the outermost gathered."""
    mesh = processes(S)
    if mesh.get_coordinate() is None:
        return None
    model = DecoderConfig(num_layers=2, num_heads=2, width=32, vocab_size=VOCAB).build(seed=0)
    if S > 1:
        fully_shard(model.blocks[0], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=3, num_fragments=1),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss_of(model, windows(1 + mesh.get_local_rank("replica")), mesh)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    with torch.no_grad():
        before = model(windows(0))
        with engine.outer_parameters_applied():
            outer = model(windows(0))
        assert torch.equal(model(windows(0)), before)
    return outer, before


def evaluate_whole_and_shards() -> tuple:
    return evaluate_outer(1), evaluate_outer(2)


@pytest.mark.slow
def test_a_sharded_model_is_evaluated_at_the_outer_parameters(decoders):
    whole, _ = decoders[2][0][0]
    for _, (outer, own) in decoders[2]:
        torch.testing.assert_close(outer, whole, rtol=0, atol=1e-3)
        assert (outer - own).abs().max() > 10 * (outer - whole).abs().max()
