"""Sharded replicas among others that come and go: their bits, their checkpoints, and how they fail."""

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.engine.cases import LR, parts_of
from tests.processes import init_group, run_replicas
from tests.rendezvous.replay import replayed
from tests.rendezvous.replicas import wait_for_entry
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.engine.parameters import gathered, local, own_place
from diloco.training.bridge import Region

P, H, T = 3, 4, 14
CASES = [
    ("e3m0", 0.5, "reduce_scatter:bf16"),
    ("sparseloco:block=64,k=8", 0.95, "gather"),
    ("pulse:density=0.3", 1.0, "reduce_scatter:bf16"),
]
CODEC = {"wire": "e3m0", "error_feedback": 0.5}


class Model(nn.Module):
    """The same on every replica; over two shards some of its parameters are uneven, and one shard is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(columns, rows) for columns, rows in ((7, 3), (4, 50), (6, 1)))


def theta0() -> list[np.ndarray]:
    return [torch.cat([p.detach().flatten() for p in block.parameters()]).numpy() for block in Model().blocks]


class Replica:
    """One process of a replica; with a group, which shards it."""

    def __init__(
        self, url: str, *, name: str, group: dist.ProcessGroup | None = None, sync_every: int = H, **settings
    ) -> None:
        self.model, self.name = Model(), name
        if group is not None:
            mesh = DeviceMesh.from_group(group, "cpu")
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh)
        rendezvous = {"timeout_seconds": 20, "poll_seconds": 0.004, "snapshot_rounds": 1000}
        engine = {"wire": "fp32", "error_feedback": None, "combine": "gather"}
        engine |= {key: settings.pop(key) for key in engine if key in settings}
        self.exchange = diloco.StoreRendezvous(url, name=name, **(rendezvous | settings))
        self.engine = diloco.StreamingDiLoCo(
            self.model,
            fragments=diloco.sequential(self.model, layers_per_fragment=1),
            schedule=diloco.Schedule(sync_every=sync_every, num_fragments=P, overlap_steps=1),
            rendezvous=self.exchange,
            **engine,
        )

    def step(self, *, tokens: int = 8) -> tuple[diloco.OuterStep, ...]:
        """θ ← θ − lr (θ − target), element by element, and the engine's step."""
        rng = np.random.default_rng((ord(self.name[0]), self.engine.num_steps + 1))
        for parameter in self.model.parameters():
            target = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), np.float32))
            target = target[own_place(parameter, part=False)]
            local(parameter).sub_(LR * (local(parameter) - target))
        return self.engine.step(tokens=tokens)

    def theta(self) -> torch.Tensor:
        return torch.cat([gathered(parameter.detach()).flatten() for parameter in self.model.parameters()])

    def outer(self) -> torch.Tensor:
        return torch.cat([gathered(outer).flatten() for outer in self.engine.outer_parameters().values()])

    def finish(self) -> None:
        self.engine.finish()
        self.exchange.leave()


def train_fixed_members(folder: str, shards: int) -> list[tuple]:
    """Replica a, of so many processes, and b, of one, with a third of a's tokens."""
    rank, results = dist.get_rank(), []
    group = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 <= shards else None
    for number, (wire, beta, combine) in enumerate(CASES):
        url, settings = f"{folder}{number}", {"wire": wire, "error_feedback": beta, "combine": combine}
        settings |= {"num_shares": 3} if combine != "gather" else {}
        if rank >= shards:
            wait_for_entry(url, 1)  # a is replica 0
        name = "a" if rank < shards else "b"
        replica = Replica(url, name=name, group=group, num_replicas=2, quorum="all", **settings)
        described, logs = [], {}
        for _ in range(T):
            outer_steps = replica.step(tokens=24 if name == "a" else 8)
            described += [(o.sync, o.norm(), o.mean_cosine(), o.successive_cosine()) for o in outer_steps]
            logs = replica.engine.logs()
        replica.engine.finish()
        counts = (
            replica.engine.bytes_sent,
            replica.engine.bytes_received,
            replica.engine._membership.uncounted_tokens,
        )
        results.append((replica.engine.outer_hash(), replica.theta(), replica.outer(), described, counts, logs))
        replica.exchange.leave()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_sharded_replica_has_the_bits_of_a_whole_one(case: int, fixed_members):
    whole, sharded, folder = fixed_members
    wire, _, combine = CASES[case]
    a, b = (process[case] for process in whole)
    first, second, beside = (process[case] for process in sharded)
    for process, expected in ((first, a), (second, a), (beside, b)):
        assert process[0] == expected[0], "the outer hash"
        assert torch.equal(process[1], expected[1]), "θ"
        assert torch.equal(process[2], expected[2]), "Θ"
        assert [sync for sync, *_ in process[3]] == [sync for sync, *_ in expected[3]]
        measured, whole_measured = (np.array([v for _, *v in each[3]], float) for each in (process, expected))
        np.testing.assert_allclose(measured, whole_measured, rtol=1e-5)
        # The member that is first makes the average of a share: bytes differ from run to run.
        counts = slice(None) if combine == "gather" else slice(2, None)
        assert process[4][counts] == expected[4][counts], "bytes, and tokens that the run does not know yet"
        for name in ("distance_to_outer", "codec_error"):
            assert process[5][name] == pytest.approx(expected[5][name], rel=1e-5)
    run = replayed(folder / f"sharded{case}", theta0(), wire=wire, second="bf16" if combine != "gather" else None)
    np.testing.assert_array_equal(first[2].numpy(), np.concatenate([rounds[-1] for rounds in run.outer]))
    names = [entry["body"]["name"] for entry in run.entries if entry["kind"] == "join"]
    assert names == ["a", "b"], "one process of a replica joins"
    assert {c["replica"]: c["tokens"] / c["steps"] for c in run.contributions} == {0: 24, 1: 8}


@pytest.fixture(scope="module")
def fixed_members(tmp_path_factory):
    """The results of two whole replicas, and of one of two shards beside a whole one."""
    folder = tmp_path_factory.mktemp("runs")
    whole = run_replicas(train_fixed_members, 2, str(folder / "whole"), 1)
    sharded = run_replicas(train_fixed_members, 3, str(folder / "sharded"), 2)
    return whole, sharded, folder


def until(replica: Replica, condition: Callable[[], bool], group: dist.ProcessGroup | None = None) -> None:
    """Step, more and more slowly, until a condition holds in the first process; all processes stop together."""
    deadline, is_over, pause_seconds = time.monotonic() + 20, torch.zeros(1), 0.01
    while not is_over:
        assert time.monotonic() < deadline
        replica.step()
        if dist.get_rank() == 0:
            is_over.fill_(condition())
        dist.broadcast(is_over, 0, group=group)
        time.sleep(pause_seconds)
        pause_seconds *= 1.01


def until_counted(replica: Replica) -> None:
    """Step until the log has counted each fragment and none is in flight."""
    exchange = replica.exchange
    until(
        replica,
        lambda: (
            all(exchange.replica in log.last_seq for log in exchange.state.fragments)
            and not replica.engine._membership.in_flight
        ),
    )


def save_and_die(folder: str) -> None:
    rank = int(os.environ["DILOCO_REPLICA"])
    init_group(folder, rank, 2)
    replica = Replica(f"{folder}/run", name="a", group=dist.group.WORLD, sync_every=8, **CODEC)
    until_counted(replica)
    state = {"model": get_model_state_dict(replica.model), "engine": replica.engine}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    saved = replica.engine.state_dict()
    error = torch.cat([gathered(e).flatten() for e in saved["error"].values()])
    then = (replica.outer(), replica.theta(), error, saved["rounds"], replica.engine.num_steps)
    torch.save(then, f"{folder}/then-{rank}")
    os.kill(os.getpid(), signal.SIGKILL)


def load(folder: str, shards: int) -> None:
    """Resume on other shards; the second time the run has counted the work of the checkpoint."""
    rank = int(os.environ["DILOCO_REPLICA"])
    init_group(f"{folder}/resumed-{shards}", rank, shards)
    group = dist.group.WORLD if shards > 1 else None
    replica = Replica(f"{folder}/run", name="a", group=group, sync_every=8, **CODEC)
    state = {"model": get_model_state_dict(replica.model), "engine": replica.engine}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_model_state_dict(replica.model, state["model"])
    outer, theta, error, rounds, num_steps = torch.load(f"{folder}/then-0")
    assert replica.engine.num_steps == num_steps and error.abs().max() > 0
    replica.engine.step()  # an inner step without progress
    now = torch.cat([gathered(e).flatten() for e in replica.engine.state_dict()["error"].values()])
    if shards == 1:  # the other resumed replica has offered it
        assert (replica.outer() - replica.theta()).abs().max() < 1e-6 and not now.any()
    else:
        torch.testing.assert_close(replica.outer() - replica.theta(), outer - theta, rtol=0, atol=1e-6)
        assert torch.equal(now, error)
    until_counted(replica)
    replica.exchange.abort("it begins again")
    replica = Replica(f"{folder}/run", name="a", group=group, sync_every=8, **CODEC)
    dcp.load(state | {"engine": replica.engine}, checkpoint_id=f"{folder}/checkpoint")
    assert (replica.outer() - outer).abs().max() > 0, "the run has gone on"
    again = replica.engine.state_dict()  # as it was loaded, since θ is not moved yet
    assert again["rounds"] == rounds
    for kind, expected in (("outer", outer), ("error", error)):
        assert torch.equal(torch.cat([gathered(tensor).flatten() for tensor in again[kind].values()]), expected)
    replica.finish()


@pytest.mark.slow
def test_a_killed_replica_resumes_on_other_shards(tmp_path):
    run_replicas(save_and_die, 2, str(tmp_path), joined=False, mortal=(0, 1))
    for shards in (2, 1):
        (tmp_path / f"resumed-{shards}").mkdir()
        run_replicas(load, shards, str(tmp_path), shards, joined=False)
    joins = [e["body"] for e in replayed(tmp_path / "run", theta0(), wire="e3m0").entries if e["kind"] == "join"]
    assert [body["name"] for body in joins] == 5 * ["a"]


def fail(folder: str, how: str) -> tuple[str, float]:
    """The end of a process: of a replica of two, where one fails at step 6, or of the whole one beside it."""
    rank = int(os.environ["DILOCO_REPLICA"])
    if rank == 2:
        replica = Replica(f"{folder}/run", name="b", num_replicas=2, patience=2)
        while min(replica.engine._membership.rounds) < 4:
            replica.step()
            time.sleep(0.004)
        replica.finish()
        return "went on", 0.0
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    replica = Replica(f"{folder}/run", name="a", group=dist.group.WORLD, num_replicas=2)
    failing, start = {"fenced": (0,), "loaded": (0, 1)}.get(how, (1,)), time.monotonic()
    try:
        while replica.engine.num_steps < 300:
            if replica.engine.num_steps == 6 and rank in failing:
                start = time.monotonic()
                _break(replica, how)
            replica.step()
            time.sleep(0.004)
    except diloco.DilocoError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "ended", 0.0


def _break(replica: Replica, how: str) -> None:
    linear = replica.model.blocks[1]
    if how == "not_finite":
        local(linear.weight)[0, 0] = float("nan")
    elif how == "replaced":
        linear.weight = nn.Parameter(linear.weight.detach().clone())
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "loaded":
        set_model_state_dict(replica.model, get_model_state_dict(replica.model))
    else:
        replica.exchange.abort("another process has joined the run as a")


ENDS = {
    "not_finite": (
        r"NonFiniteError: step ([789]|\d\d+): the outer gradient of blocks.1.weight",
        r"ExchangeError: process 0 of this replica failed: step ([789]|\d\d+): the outer gradient of blocks",
    ),
    "replaced": (
        r"ExchangeError: process 1 of this replica failed: step ([789]|\d\d+): parameter blocks.1.weight",
        r"UserError: step ([789]|\d\d+): parameter blocks.1.weight was replaced",
    ),
    "killed": ("ExchangeError: process 1 of this replica does not answer", None),
    "loaded": (
        "UserError: parameters were loaded into the model after the engine",
        "ExchangeError: process 0 of this replica failed: parameters were loaded into the model",
    ),
    "fenced": (
        "ExchangeError: step 6: another process has joined the run as a",
        "ExchangeError: process 0 of this replica failed: another process has joined the run as a",
    ),
}


@pytest.mark.parametrize(
    "how", ["not_finite", *(pytest.param(how, marks=pytest.mark.slow) for how in [*ENDS][1:])]
)
def test_a_process_that_fails_ends_its_replica_with_a_sentence_and_the_others_go_on(how: str, tmp_path):
    mortal = (1,) if how == "killed" else ()
    ends = run_replicas(fail, 3, str(tmp_path), how, joined=False, mortal=mortal)
    assert ends[2] == ("went on", 0.0)
    for end, expected in zip(ends[:2], ENDS[how], strict=True):
        if expected is not None:
            assert re.match(expected, end[0]) and end[1] < 10, end
    replayed(tmp_path / "run", theta0())


def train_with_shifts(folder: str) -> tuple[torch.Tensor, int]:
    """A replica of two processes, and the bridge of its run, which moves Θ by 1/2 of everything three times."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if group is not None:
        replica = Replica(folder, name="a", group=group, bridge="eu", num_replicas=1)
        until(replica, Path(f"{folder}-shifted").exists, group)
        replica.engine.finish(flush=True, close=True)
        replica.exchange.leave()
        return replica.outer(), 0
    wait_for_entry(folder, 1)
    rendezvous = diloco.StoreRendezvous(folder, name="eu", bridge="eu", timeout_seconds=20, poll_seconds=0.004)
    region = Region(parts_of(Model(), sync_every=H, overlap_steps=0, mixing=0.5), rendezvous)
    num_shifts = 0
    for _ in range(3):
        num_shifts += sum(region.shift(p, torch.full_like(region.vector(p), 0.5)) for p in range(P))
    Path(f"{folder}-shifted").touch()
    rendezvous.leave()
    return torch.zeros(1), num_shifts


@pytest.mark.slow
def test_the_shards_of_a_replica_take_shifts(tmp_path) -> None:
    folder = str(tmp_path / "store")
    (first, _), (second, _), (_, num_shifts) = run_replicas(train_with_shifts, 3, folder)
    run = replayed(folder, theta0())
    assert num_shifts == 3 * P, "while the replica trained"
    assert torch.equal(first, second)
    last = np.concatenate([rounds[-1] for rounds in run.outer])
    np.testing.assert_array_equal(first.numpy(), last)
