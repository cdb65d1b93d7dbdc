"""Sharded replicas where a mesh, a link or a shard fails."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from tests.engine.test_sharded import VOCAB, M, decoder, processes
from tests.processes import run_replicas
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.engine.parameters import local
from diloco.exchange.process_group import TorchGroup
from diloco.exchange.transport import Channel
from diloco.models.decoder_config import DecoderConfig


def one_mesh_for_all() -> str:
    model = DecoderConfig(num_layers=2, num_heads=2, width=32, vocab_size=VOCAB).build(seed=0)
    fully_shard(model)
    with pytest.raises(diloco.DisagreementError) as caught:
        diloco.StreamingDiLoCo(
            model,
            fragments=diloco.whole(model),
            schedule=diloco.Schedule(sync_every=3, num_fragments=1),
            exchange=diloco.ProcessGroupExchange(timeout_seconds=20),
        )
    return str(caught.value)


def test_a_mesh_that_spans_replicas_is_refused():
    for messages in run_replicas(one_mesh_for_all, 2):
        assert "a replica's mesh has no process of another replica" in messages
        assert "replica 0 has [0, 2], replica 1 has [1, 2]" in messages


def tell_each_other() -> list[str]:
    """The ends of four pieces of work in a shard on a GPU, of which one fails here or in the other shard."""
    heard = []
    for failing in (None, 0, 1, None):
        try:
            with TorchGroup(dist.group.WORLD, torch.device("cuda")).fail_together("another shard"):
                if dist.get_rank() == failing:
                    raise ZeroDivisionError
            heard.append("well")
        except (ZeroDivisionError, diloco.ExchangeError) as error:
            heard.append(type(error).__name__)
    return heard


def test_shards_on_gpus_fail_together_without_a_gpu():
    here, elsewhere = "ZeroDivisionError", "ExchangeError"
    expected = [["well", here, elsewhere, "well"], ["well", elsewhere, here, "well"]]
    assert run_replicas(tell_each_other, 2) == expected


class Mute(diloco.ProcessGroupExchange):
    """Neither sends nor receives a fragment."""

    def start(self, payloads, tag):
        if tag.channel is not Channel.PAYLOAD:
            return super().start(payloads, tag)

        def wait() -> NoReturn:
            time.sleep(3)
            raise diloco.ExchangeError(f"{tag}: lost", (1 - self.replica,))

        return SimpleNamespace(wait=wait)


def lose_the_link_of_one_shard() -> str:
    """The other shards have theirs, and wait for less long than the link does to fail."""
    ranks = [[0, 1], [2, 3]]

    def group(ranks_of_groups: list[list[int]]) -> dist.ProcessGroup:
        made = [dist.new_group(members, timeout=timedelta(seconds=2)) for members in ranks_of_groups]
        return next(one for one, members in zip(made, ranks_of_groups, strict=True) if dist.get_rank() in members)

    mesh = DeviceMesh.from_group(
        [group([list(others) for others in zip(*ranks, strict=True)]), group(ranks)],
        "cpu",
        mesh=torch.tensor(ranks),
        mesh_dim_names=("replica", "shard"),
    )
    model = decoder(mesh)
    kind = Mute if tuple(mesh.get_coordinate()) == (1, 0) else diloco.ProcessGroupExchange
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=2, num_fragments=1),
        exchange=kind(mesh.get_group("replica"), timeout_seconds=3),
    )
    engine.step()
    with pytest.raises(diloco.ExchangeError) as caught:
        engine.step()
    return str(caught.value)


@pytest.mark.slow
def test_a_link_that_fails_is_named_even_if_the_other_shards_have_given_up():
    waits, beside, lost, beside_lost = run_replicas(lose_the_link_of_one_shard, M * 2)
    assert waits.startswith("step 2: fragment 0, round 1: replica 1 failed: step 2: fragment 0, round 1: lost")
    assert lost == "step 2: fragment 0, round 1: lost"
    for replica, messages in enumerate((beside, beside_lost)):
        assert messages.startswith(f"step 2: another shard of replica {replica} does not answer: ")


def lose_one_shard() -> str:
    """The first shard of replica 1 is no longer finite at the first sync."""
    mesh = processes(2)
    model = decoder(mesh)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=2, num_fragments=1, overlap_steps=1),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=5),
    )
    try:
        for step in range(1, 4):
            if step == 2 and tuple(mesh.get_coordinate()) == (1, 0):
                local(model.get_parameter("norm.weight")).fill_(float("nan"))
            engine.step()
    except (diloco.NonFiniteError, diloco.ExchangeError) as error:
        return f"{type(error).__name__}: {error}"
    return "merged"


@pytest.mark.slow
def test_a_shard_that_is_not_finite_is_named_and_no_shard_of_any_replica_merges():
    waits, waits_too, named, sends_nothing = run_replicas(lose_one_shard, M * 2)
    assert named.startswith("NonFiniteError: step 2: the outer gradient of norm.weight (replica 1, fragment 0)")
    assert waits.startswith("ExchangeError") and "replica 1" in waits
    assert sends_nothing == "ExchangeError: step 2: another shard of replica 1 failed, and says why"
    assert waits_too.startswith("ExchangeError")


def split_one_shard() -> tuple[int, str, bool]:
    """Θ of the first shard of replica 1 changes after round 1: the step that fails, its error, if θ was kept."""
    mesh = processes(2)
    model = decoder(mesh)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=2, num_fragments=1),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=5),
    )
    for step in range(1, 7):
        before = [local(p).clone() for p in model.parameters()]
        try:
            engine.step()
        except (diloco.DisagreementError, diloco.ExchangeError) as error:
            kept = all(map(torch.equal, before, map(local, model.parameters())))
            return step, f"{type(error).__name__}: {error}", kept
        if step == 2 and tuple(mesh.get_coordinate()) == (1, 0):
            engine._replica.state.at_home("outer")[0].view(torch.int32)[0] ^= 1
    return 0, "merged", False


@pytest.mark.slow
def test_a_split_between_the_same_shards_of_two_replicas_ends_all_shards_before_they_merge():
    first, beside, second, beside_second = run_replicas(split_one_shard, M * 2)
    for (step, error, kept), other in ((first, 1), (second, 0)):
        assert (step, kept) == (4, True), error
        assert error.startswith("DisagreementError: step 4: fragment 0, round 2: ") or "failed: " in error
        assert f"the outer parameters of replica {other} are no longer those of this replica" in error, error
    for step, error, kept in (beside, beside_second):
        assert (step, kept) == (4, True) and error.startswith("ExchangeError: "), error
