"""Scripts that set torch's default dtype: the engine's bits are the same."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.engine.cases import Case, inner_step, outer_of, parts_of
from tests.processes import run_replicas
from tests.rendezvous.replicas import P, Replica, new_model
from tests.wire.cases import SPARSE
from torch import nn

import diloco
from diloco.engine.elastic_shards import FollowingMembership, _Taken
from diloco.outer.digest import parameters_hash

DEFAULTS = [torch.float32, torch.bfloat16, torch.float64]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train_fixed_groups() -> list[list[str]]:
    """For each default dtype the hashes of what a codec of each kind makes of Θ, Δ_p and the logs."""
    results = []
    for dtype in DEFAULTS:
        hashes = []
        ways = [(wire, "gather") for wire in ("bf16", "e3m0", "int4", *SPARSE)]
        ways += [("e3m0", "reduce_scatter:bf16"), ("topk", "reduce_scatter:bf16")]
        for wire, combine in ways:
            beta = 0.5 if combine == "gather" and wire != "dare" else None
            beta = 1.0 if wire == "pulse" else beta
            case = Case(P=2, T=9, layers_per_fragment=2, wire=wire, combine=combine, beta=beta)
            model = case.model()
            with default_dtype(dtype):
                hashes.append(parameters_hash(dict(enumerate(trained(case, model)))))
        results.append(hashes)
    return results


def trained(case: Case, model: nn.Module) -> list[torch.Tensor]:
    engine = case.engine(model)
    made = []
    for t in range(1, case.T + 1):
        inner_step(model, engine.exchange.replica, t)
        for outer_step in engine.step():
            outer_step.begin(layer_cosine=True)
            made += [
                outer_step.average,
                *outer_step.deltas,
                torch.tensor([outer_step.norm()], dtype=torch.float64),
            ]
            if outer_step.deltas:
                made.append(torch.tensor([outer_step.mean_cosine()], dtype=torch.float64))
    engine.load_state_dict(engine.state_dict())
    logs = engine.logs()
    made.append(torch.tensor([logs["distance_to_outer"], logs["codec_error"]], dtype=torch.float64))
    engine.finish()
    return [*made, torch.from_numpy(outer_of(engine))]


@pytest.mark.slow
def test_a_fixed_group_makes_the_same_bits():
    for first, *others in run_replicas(train_fixed_groups, 2, timeout_seconds=120):
        assert others == [first] * 2


def send_zeros() -> None:
    """A fragment that nobody trains."""
    for dtype in DEFAULTS:
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        with default_dtype(dtype):
            engine = diloco.StreamingDiLoCo(
                model,
                fragments="whole",
                sync_every=2,
                overlap_steps=1,
                exchange=diloco.ProcessGroupExchange(timeout_seconds=20),
            )
            before = engine.outer_hash()
            for _ in range(5):
                engine.step()
            engine.finish()
            assert engine.bytes_received and engine.outer_hash() == before


def test_equal_payloads_of_zeros_are_no_mistake():
    run_replicas(send_zeros, 2)


@pytest.mark.slow
def test_replicas_that_meet_in_a_store(tmp_path):
    models = [new_model() for _ in range(2)]
    outer_steps = []
    with default_dtype(torch.bfloat16):
        settings = {"combine": "reduce_scatter", "wire": "e3m0", "error_feedback": 1.0, "patience": 0}
        replicas = [Replica(str(tmp_path), name=str(n), model=m, **settings) for n, m in enumerate(models)]
        deadline = time.monotonic() + 20
        while min(rounds := [sum(replica.rounds) for replica in replicas]) < 2 * P:
            assert time.monotonic() < deadline, rounds
            outer_steps += [outer_step for replica in replicas for outer_step in replica.step(pause_seconds=0.002)]
        assert all(outer_step.average.dtype == torch.float32 for outer_step in outer_steps)
        for replica in replicas:
            assert replica.engine._membership.failure is None
            assert all(theta.dtype == torch.float32 for theta in replica.model.parameters())
            replica.finish()


def test_all_processes_of_a_replica_add_up_numbers_of_one_type():
    """Numbers of an outer step that the first of them has taken in a store."""
    follower = FollowingMembership.__new__(FollowingMembership)
    follower.replica = parts_of(new_model(), sync_every=2, overlap_steps=0, mixing=0.5)
    with default_dtype(torch.bfloat16):
        outer_step = follower._outer_step(_Taken(0, 1, 2, num_deltas=2))
        assert [vector_N.dtype for vector_N in (outer_step.average, *outer_step.deltas)] == [torch.float32] * 3
