"""Buffers that training changes: named, or averaged at the end."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas
from torch import Tensor, nn

import diloco
from diloco.engine.streaming import Buffers

CHANGED = ["1.running_mean", "1.running_var", "seen"]


def network() -> nn.Module:
    """Training changes three buffers, one of them on replica 1 alone, and leaves the table as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.register_buffer("table", torch.tensor([1 / 3, -torch.inf]))
    model.register_buffer("seen", torch.zeros(2, dtype=torch.bfloat16))
    return model


def engine_of(model: nn.Module, buffers: str) -> diloco.StreamingDiLoCo:
    exchange = diloco.ProcessGroupExchange(timeout_seconds=20)
    return diloco.StreamingDiLoCo(
        model, fragments="whole", sync_every=2, overlap_steps=1, buffers=buffers, exchange=exchange
    )


def train(buffers: str) -> tuple[str, list[str], dict[str, Tensor], dict[str, Tensor]]:
    """The hash of Θ, the warnings, and the buffers before and after `finish()`."""
    model = network()
    engine, optimizer = engine_of(model, buffers), torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 4, generator=data)).square().mean().backward()
            optimizer.step()
            model.seen += dist.get_rank()
            engine.step()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        engine.finish()
    assert all(warning.filename == __file__ for warning in caught)
    return engine.outer_hash(), [str(each.message) for each in caught], before, dict(model.named_buffers())


def test_they_stay_each_replicas_own_and_are_named():
    (hash_0, named_0, *_), (hash_1, named_1, before, after) = run_replicas(train, 2, "own")
    assert hash_0 == hash_1 and all(torch.equal(buffer, before[name]) for name, buffer in after.items())
    for names, messages in (("1.running_mean, 1.running_var", named_0), ("seen, 1.running_mean, 1.runn", named_1)):
        (message,) = messages
        assert f"not exchanged: {names}" in message
        assert "pass buffers='average', or estimate them anew" in message


def test_they_are_averaged_at_the_end_with_the_same_bits_on_all_replicas():
    results = run_replicas(train, 2, "average")
    befores, afters = [before for _, _, before, _ in results], [after for *_, after in results]
    assert not any(messages for _, messages, *_ in results)
    for name, buffer in afters[0].items():
        mean = sum(before[name].double() for before in befores) / 2
        expected = mean.to(buffer.dtype) if name in CHANGED else befores[0][name]
        assert torch.equal(buffer, expected) and torch.equal(buffer, afters[1][name]), name
    assert not torch.equal(befores[0]["1.running_mean"], befores[1]["1.running_mean"])
    assert befores[0]["seen"].tolist() == [0, 0] and afters[0]["seen"].tolist() == [2.5, 2.5]


def start_differently() -> None:
    with pytest.raises(
        diloco.DisagreementError, match='disagree on buffers: replica 0 has "own", replica 1 has "av'
    ):
        engine_of(network(), ("own", "average")[dist.get_rank()])


def test_replicas_that_average_them_and_others_are_refused():
    run_replicas(start_differently, 2)


def test_a_store_keeps_none(tmp_path):
    with pytest.raises(diloco.UserError, match="buffers=average needs an exchange"):
        diloco.StreamingDiLoCo(
            network(), fragments="whole", buffers="average", rendezvous=diloco.StoreRendezvous(str(tmp_path))
        )
    with pytest.raises(diloco.UserError, match="buffers='mean' is neither own nor average"):
        diloco.StreamingDiLoCo(network(), fragments="whole", buffers="mean", exchange=diloco.LoopbackExchange())


def test_caches_and_sparse_buffers_are_no_concern():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    buffers = Buffers(model)
    model.cache = torch.ones(5)
    model.register_buffer("late", torch.ones(1))
    assert buffers.changed() == []
    model.mean += 1
    assert buffers.changed() == ["mean"]
    buffers.begin()
    assert buffers.changed() == []


def differ_in_shape() -> str:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2 + dist.get_rank()))
    with pytest.raises(diloco.DisagreementError) as caught:
        Buffers(model).average(diloco.ProcessGroupExchange())
    return str(caught.value)


def test_buffers_of_other_shapes_are_named():
    for message in run_replicas(differ_in_shape, 2):
        assert "the shape of buffer mean: replica 0 has [2], replica 1 has [3]" in message


def test_a_change_below_fp32_is_seen():
    model = nn.Module()
    model.register_buffer("mean", torch.ones(2, dtype=torch.float64))
    buffers = Buffers(model)
    model.mean[1] += 1e-12
    assert buffers.changed() == ["mean"]


def build_behind_a_leader() -> str:
    replica, rank = divmod(int(os.environ["DILOCO_REPLICA"]), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    exchange = diloco.connect(replica=replica, num_replicas=2, leader=True, timeout_seconds=20)
    with pytest.raises(diloco.UserError) as caught:
        diloco.StreamingDiLoCo(network(), fragments="whole", buffers="average", exchange=exchange)
    return str(caught.value)


def test_processes_behind_a_leader_are_refused():
    for message in run_replicas(build_behind_a_leader, 4, joined=False):
        assert "buffers=average needs replicas of one process" in message
