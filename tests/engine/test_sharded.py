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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

import diloco
from diloco.engine.parameters import gathered, local
from diloco.models.cross_entropy import cross_entropy
from diloco.models.decoder_config import DecoderConfig
from diloco.outer.digest import parameters_hash
from diloco.schedule import Sync

M = 2
NUM_STEPS, BATCH, LENGTH, VOCAB = 30, 6, 32, 65  # 65 rows are cut into 33 and 32


def processes(S: int) -> DeviceMesh:
    return init_device_mesh("cpu", (M, S), mesh_dim_names=("replica", "shard"))


def sharded(model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh) -> nn.Module:
    if mesh.shape[1] > 1:
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["shard"], reshard_after_forward=True)
    return model


def decoder(mesh: DeviceMesh) -> nn.Module:
    model = DecoderConfig(num_layers=2, num_heads=2, width=32, vocab_size=VOCAB).build(seed=0)
    return sharded(model, model.blocks, mesh)


def llama(mesh: DeviceMesh) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return sharded(model, model.model.layers, mesh)


MODELS = {"decoder": decoder, "llama": llama}


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


def windows(seed: int) -> torch.Tensor:
    """Sequences that count up in steps of 1 to 3, which a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % VOCAB


def loss_of(model: nn.Module, window: torch.Tensor, mesh: DeviceMesh) -> tuple[torch.Tensor, float]:
    """This process's loss on its share of the sequences, and the replica's on all of them."""
    share = window.chunk(mesh.shape[1])[mesh.get_local_rank("shard")]
    loss, _ = cross_entropy(logits(model, share[:, :-1]).flatten(0, 1), share[:, 1:].flatten(), 0.0)
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.get_group("shard"))
    return loss, mean.item() / mesh.shape[1]


def engine_of(model: nn.Module, mesh: DeviceMesh, **settings: object) -> diloco.StreamingDiLoCo:
    fragments = diloco.strided(model, layers_per_fragment=1)
    return diloco.StreamingDiLoCo(
        model,
        fragments=fragments,
        schedule=diloco.Schedule(sync_every=10, num_fragments=len(fragments), overlap_steps=(2, 7)),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
        **settings,
    )


def train(
    S: int,
    kind: str,
    wire: str,
    combine: str = "gather",
    error_feedback: float | None = None,
    offload: bool = False,
) -> tuple:
    """The replica's losses, the held-out loss of Θ, its hash, and what an outer step tells."""
    mesh = processes(S)
    model = MODELS[kind](mesh)
    engine = engine_of(model, mesh, wire=wire, combine=combine, error_feedback=error_feedback, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, outer_steps = [], []
    for step in range(1, NUM_STEPS + 1):
        loss, mean = loss_of(model, windows(seed=100 * engine.exchange.replica + step), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer_steps += engine.step()
        losses.append(mean)
    outer_steps += engine.finish()
    messages = [(o.norm(), o.mean_cosine()) for o in outer_steps]
    with torch.no_grad():
        for name, outer in engine.outer_parameters().items():
            local(model.get_parameter(name)).copy_(local(outer))
        held_out = loss_of(model, windows(seed=12345), mesh)[1]
    return losses, held_out, engine.outer_hash(), messages, (engine.bytes_sent, engine.bytes_received)


@pytest.fixture(scope="module")
def in_e3m0():
    """Replicas of one process, and of two."""
    return {S: run_replicas(train, M * S, S, "decoder", "e3m0") for S in (1, 2)}


@pytest.mark.slow
def test_shards_train_as_a_whole_replica_does():
    expected_by_replica = run_replicas(train, M, 1, "decoder", "fp32")
    results = run_replicas(train, M * 3, 3, "decoder", "fp32")
    for rank, (losses, held_out, _, messages, _) in enumerate(results):
        expected = expected_by_replica[rank // 3]
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert held_out == pytest.approx(expected[1], abs=1e-5)
        assert messages == [(pytest.approx(n, rel=1e-3), pytest.approx(c, abs=1e-3)) for n, c in expected[3]]
    assert losses[-1] < losses[0] - 0.3


def test_blocks_that_begin_anew_in_each_shard_train_as_well(in_e3m0):
    assert in_e3m0[2][0][1] == pytest.approx(in_e3m0[1][0][1], rel=0.005)
    assert len({outer_hash for _, _, outer_hash, _, _ in in_e3m0[2]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "combine", "error_feedback"),
    [("e3m0", "reduce_scatter:bf16", None), ("topk:density=0.2", "gather", 1.0)],
)
def test_all_shards_of_all_replicas_agree_on_the_whole_outer_parameters(wire, combine, error_feedback):
    results = run_replicas(train, M * 2, 2, "decoder", wire, combine, error_feedback)
    assert len({outer_hash for _, _, outer_hash, _, _ in results}) == 1


@pytest.mark.slow
def test_offload_changes_no_bit(in_e3m0):
    offloaded = run_replicas(train, M * 2, 2, "decoder", "e3m0", "gather", None, True)
    assert [outer_hash for _, _, outer_hash, _, _ in offloaded] == [in_e3m0[2][0][2]] * 4


def test_bytes_are_those_of_all_shards(in_e3m0):
    *_, (whole_sent, _) = in_e3m0[1][0]
    for *_, (sent, received) in in_e3m0[2]:
        assert sent == received
        # A header and a scale more for every shard's payload.
        assert whole_sent < sent < 1.05 * whole_sent


@pytest.mark.slow
def test_a_transformers_model_that_the_user_shards():
    pytest.importorskip("transformers")
    imports = ["transformers.models.llama.modeling_llama"]
    expected = run_replicas(train, M, 1, "llama", "fp32", imports=imports)
    results = run_replicas(train, M * 2, 2, "llama", "fp32", imports=imports)
    for rank, (losses, held_out, _, _, _) in enumerate(results):
        assert losses == pytest.approx(expected[rank // 2][0], abs=1e-5)
        assert held_out == pytest.approx(expected[rank // 2][1], abs=1e-5)
    assert len({outer_hash for _, _, outer_hash, _, _ in results}) == 1


def train_and_save(S: int, wire: str, folder: Path) -> tuple[str, torch.Tensor]:
    """Θ after 34 steps, of a run that saves at the 24th, or goes on from there."""
    mesh = processes(S)
    model = decoder(mesh)
    engine = engine_of(model, mesh, wire=wire, error_feedback=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    of_replica = {
        "checkpoint_id": folder / f"replica-{mesh.get_local_rank('replica')}",
        "process_group": mesh.get_group("shard"),
    }
    if of_replica["checkpoint_id"].exists():
        state = whole_state(model, optimizer, engine)
        dcp.load(state, **of_replica)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert engine.num_steps == 24
        assert engine.state_dict()["in_flight"] == [[0, 2, 20], [1, 2, 23]]
    for step in range(engine.num_steps + 1, 35):
        loss, _ = loss_of(model, windows(seed=100 * engine.exchange.replica + step), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        if step == 24:
            dcp.save(whole_state(model, optimizer, engine), **of_replica)
    engine.finish()
    outer_hash = engine.outer_hash()
    return outer_hash, torch.cat([gathered(theta).flatten() for theta in engine.outer_parameters().values()])


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: diloco.StreamingDiLoCo
) -> dict[str, object]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "engine": engine}


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "e3m0"])
def test_a_loop_of_ones_own_saves_and_resumes(tmp_path, wire):
    (expected, outer_N), *_ = run_replicas(train_and_save, M * 2, 2, wire, tmp_path)
    resumed = run_replicas(train_and_save, M * 2, 2, wire, tmp_path)
    assert {outer_hash for outer_hash, _ in resumed} == {expected}
    if wire == "fp32":
        for _, other_N in run_replicas(train_and_save, M, 1, wire, tmp_path):
            torch.testing.assert_close(other_N, outer_N, rtol=0, atol=1e-4)


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


def train_one_row(wire: str) -> tuple[str, str]:
    mesh = processes(2)
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
    return first, engine.outer_hash()


@pytest.mark.parametrize("wire", ["fp32", "e3m0", "int4", "topk:density=0.5"])
def test_a_shard_may_be_empty(wire):
    results = run_replicas(train_one_row, M * 2, wire)
    assert len(set(results)) == 1 and results[0][0] != results[0][1]


def start_with_odd_shards() -> list[str]:
    """The refusals of models that are sharded in other ways."""
    mesh = processes(2)
    messages = []
    for build in (_half_sharded, _over_all, _replicated):
        model = build(mesh)
        try:
            diloco.StreamingDiLoCo(
                model,
                fragments=diloco.whole(model),
                schedule=diloco.Schedule(sync_every=2, num_fragments=1),
                exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
            )
        except ValueError as error:
            messages.append(str(error))
    return messages


def _replicated(mesh: DeviceMesh) -> nn.Module:
    return distribute_module(OneRow(), mesh["shard"])


def _half_sharded(mesh: DeviceMesh) -> nn.Module:
    model = OneRow()
    fully_shard(model.layers[0], mesh=mesh["shard"])
    return model


def _over_all(mesh: DeviceMesh) -> nn.Module:
    model = OneRow()
    fully_shard(model, mesh=mesh)
    return model


def test_a_model_that_is_not_sharded_over_its_replica_is_refused():
    for half, over_all, replicated in run_replicas(start_with_odd_shards, M * 2):
        assert "layers.1.weight is on one process" in half and "mesh=mesh['shard']" in half
        assert "of 2 dimensions" in over_all and "mesh=mesh['shard']" in over_all
        assert "not cut into shards" in replicated


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


def test_frozen_parameters_may_be_whole():
    assert len(set(run_replicas(train_beside_frozen_parameters, M * 2))) == 1


def gather(S: int) -> tuple[str, float]:
    """A hash over the whole, from whole tensors and from shards."""
    model = decoder(processes(S))
    named = dict(model.named_parameters())
    norm = math.sqrt(sum(gathered(p).square().sum().item() for p in named.values()))
    return parameters_hash(named, gathered), norm


def test_the_hash_does_not_depend_on_the_shards():
    results = {run_replicas(gather, M * S, S)[-1] for S in (1, 2)}
    assert len(results) == 1


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


@pytest.mark.slow
def test_shards_mask_other_places_and_replicas_the_same():
    first, second, *others = run_replicas(what_is_masked, M * 2)
    assert first != second and others == [first, second]


def evaluate_outer(S: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of Θ, and of the replica's own parameters before and after; FSDP keeps the outermost gathered."""
    mesh = processes(S)
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
        before = logits(model, windows(0))
        with engine.outer_parameters_applied():
            outer = logits(model, windows(0))
        assert torch.equal(logits(model, windows(0)), before)
    return outer, before


@pytest.mark.slow
def test_a_sharded_model_is_evaluated_at_the_outer_parameters():
    (whole, _), *_ = run_replicas(evaluate_outer, M, 1)
    for outer, own in run_replicas(evaluate_outer, M * 2, 2):
        torch.testing.assert_close(outer, whole, rtol=0, atol=1e-3)
        assert (outer - own).abs().max() > 10 * (outer - whole).abs().max()
