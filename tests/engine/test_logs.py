"""Legend: see tests/engine/cases.py."""

import itertools
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, outer_of, theta_of, through
from tests.processes import run_replicas
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.engine.parameters import gathered

SLOWER_SECONDS = 1.5


def logs_of(case: Case, slow_replica: int) -> tuple[dict[str, float], dict[str, float], dict, dict, float]:
    """The logs before the first sync and after a merge, values to compare them with, and the last step's seconds.

    The values are the norm of θ − Θ, the last sync's codec error, and counters; those seconds include the logs'.
    """
    model = case.model()
    engine = case.engine(model)
    before = engine.logs()
    for t in range(1, case.H + 1):
        inner_step(model, engine.exchange.replica, t)
        if t == case.H:
            delta = outer_of(engine) - theta_of(model)
            dist.barrier()
            if engine.exchange.replica == slow_replica:
                time.sleep(SLOWER_SECONDS)
        start = time.monotonic()
        engine.step()
    after = engine.logs()
    seconds = time.monotonic() - start
    expected = {
        "distance_to_outer": np.linalg.norm(theta_of(model) - outer_of(engine)),
        "codec_error": np.linalg.norm(delta - through(case.wire)(delta)) / np.linalg.norm(delta),
        "blocked_seconds": engine.blocked_seconds,
        "bytes_sent": engine.bytes_sent,
    }
    return before, after, expected, engine.logs(computed=False), seconds


COUNTERS = {"num_steps", "bytes_sent", "bytes_received", "blocked_seconds", "encode_seconds", "merge_seconds"}


def test_logs_of_two_replicas_of_which_one_is_late():
    case = Case(P=1, tau=0, wire="e3m0")
    results = run_replicas(logs_of, 2, case, 1)
    for replica, (before, after, expected, counters, seconds) in enumerate(results):
        other = f"replica_{1 - replica}"
        assert set(before) == COUNTERS | {"distance_to_outer", f"last_heard_seconds/{other}"}
        assert before["distance_to_outer"] == before["encode_seconds"] == before["num_steps"] == 0
        for name, value in expected.items():
            assert after[name] == pytest.approx(value, rel=1e-5), name
        assert after["num_steps"] == case.H and after["bytes_received"] == after["bytes_sent"] > 0
        assert 0 < after["codec_error"] < 0.5 and after["distance_to_outer"] > 0
        assert 0 < after["encode_seconds"] < 5 and 0 < after["merge_seconds"] < 5
        since_the_wait = seconds - after[f"lateness_seconds/{other}"]
        assert 0 <= after[f"last_heard_seconds/{other}"] <= since_the_wait
        assert set(after) - set(counters) == {"distance_to_outer", "codec_error"}
        assert all(type(value) is float for value in after.values())
    punctual, late = results[0][1], results[1][1]
    blocked_seconds, lateness = punctual["blocked_seconds"], punctual["lateness_seconds/replica_1"]
    assert blocked_seconds > SLOWER_SECONDS / 2 > late["lateness_seconds/replica_0"]
    assert 0.9 * blocked_seconds < lateness <= blocked_seconds
    seconds = punctual["bytes_sent"] * 8e-6 / punctual["exchange_mbit_s"]
    assert blocked_seconds <= seconds <= results[0][4], "the send and the wait began together, in the last step"


def logs_without_a_wait() -> list[tuple[dict[str, float], float, float]]:
    return [without_a_wait(Case(P=1, tau=1, combine=combine)) for combine in ("gather", "reduce_scatter")]


def without_a_wait(case: Case) -> tuple[dict[str, float], float, float]:
    """The logs, and two bounds of the seconds between a send and the end of the wait for it."""
    model = case.model()
    engine = case.engine(model)
    for t in range(1, case.H + 2):
        inner_step(model, engine.exchange.replica, t)
        if t > case.H:
            sent = time.monotonic()
            dist.barrier()
            time.sleep(1.5)  # while the payloads travel
            waits = time.monotonic()
        else:
            start = time.monotonic()
        engine.step()
    return engine.logs(), waits - sent, time.monotonic() - start


def test_the_rate_of_an_exchange_that_nobody_waited_for_is_a_lower_bound():
    for logs, least, most in itertools.chain(*run_replicas(logs_without_a_wait, 2)):
        assert "exchange_mbit_s" not in logs
        assert least <= logs["bytes_sent"] * 8e-6 / logs["exchange_mbit_s_at_least"] <= most


def test_a_replica_alone_has_no_peers_and_no_rate():
    case = Case(P=2, tau=1, offload=True, parameters="bf16")
    model = case.model()
    engine = case.engine(model)
    for t in range(1, case.T + 1):
        inner_step(model, 0, t)
        engine.step()
        theta, outer = theta_of(model), outer_of(engine)
        distance = engine.logs()["distance_to_outer"]
        assert distance == pytest.approx(np.linalg.norm(theta - outer), rel=1e-5)
        assert np.array_equal(theta_of(model), theta) and np.array_equal(outer_of(engine), outer)
    assert set(engine.logs()) == COUNTERS | {"distance_to_outer", "codec_error", "successive_cosine", "gain"}
    assert engine.logs()["codec_error"] == 0, "fp32 loses nothing"


def test_logs_change_no_bit_of_what_follows():
    def trained(*, asked: bool) -> str:
        case = Case(P=2, tau=1, wire="e3m0", beta=1.0, offload=True)
        model = case.model()
        engine = case.engine(model)
        for t in range(1, case.T + 1):
            inner_step(model, 0, t)
            engine.step()
            if asked:
                with torch.inference_mode():  # as in an evaluation
                    engine.logs()
        engine.finish()
        return engine.outer_hash()

    assert trained(asked=True) == trained(asked=False)


def logs_of_shards() -> tuple[dict[str, float], float, float]:
    """A sharded replica's logs, and ‖θ − Θ‖ and the codec's error from the gathered tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(31, 7, bias=False), mesh=mesh["shard"])
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=2, num_fragments=1, overlap_steps=1),
        exchange=diloco.ProcessGroupExchange(mesh.get_group("replica"), timeout_seconds=20),
        wire="bf16",
    )
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(0.1 * step + 0.01 * mesh.get_rank())
        engine.step()
    (outer,), (theta,) = engine.outer_parameters().values(), model.parameters()
    delta = gathered(outer) - gathered(theta.detach())
    error = delta.bfloat16().float() - delta
    return engine.logs(), delta.norm().item(), (error.norm() / delta.norm()).item()


def test_logs_of_a_sharded_replica_cover_all_shards():
    for logs, distance, codec_error in run_replicas(logs_of_shards, 4):
        assert logs["distance_to_outer"] == pytest.approx(distance, rel=1e-5)
        assert logs["codec_error"] == pytest.approx(codec_error, rel=1e-5) and codec_error > 0
