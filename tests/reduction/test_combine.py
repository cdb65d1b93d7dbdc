import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import run_replicas

import diloco
from diloco.errors import PayloadError
from diloco.reduction.combine import Gather, ReduceScatter, combine_by, encode_with_feedback
from diloco.wire import Key, codec

LOSSY = ["bf16", "e4m3", "e2m1", "e3m0", "int4", "int2", "topk:density=0.1", "feddropout:density=0.3"]


@pytest.mark.parametrize("wire", ["fp32", *LOSSY, "e3m0:stochastic=true", "topk:density=0.1,values=int2"])
@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
@given(
    seed=st.integers(0, 2**32 - 1), num_elements=st.sampled_from([1, 2, 37, 700]), num_replicas=st.integers(1, 4)
)
def test_error_feedback_sends_everything_in_the_end(wire, combine, seed, num_elements, num_replicas):
    """β = 1: Σ sent + e = Σ Δ, but for FP32's rounding of the sums."""
    rng = np.random.default_rng(seed)
    deltas = torch.from_numpy(rng.standard_normal((8, num_elements)).astype(np.float32))
    way, error = combine_by(combine, codec(wire)), torch.zeros(num_elements)
    sent = torch.zeros(num_elements, dtype=torch.float64)
    for r, delta in enumerate(deltas, start=1):
        key = Key(seed, 0, r, 0)
        payloads, error = encode_with_feedback(way, delta, error, 1.0, key, num_replicas)
        sent += way.decode(payloads, num_elements, key).double()
    scale = deltas.abs().sum(dim=0).max().item()
    np.testing.assert_allclose(
        (sent + error).numpy(), deltas.double().sum(dim=0).numpy(), atol=1e-5 * scale, rtol=0
    )


def test_error_feedback_is_the_equation():
    way, key = Gather(codec("topk:density=0.25")), Key()
    payloads, error = encode_with_feedback(
        way, torch.tensor([1.0, 3, 5, 2]), torch.tensor([4.0, 2, 0, 0]), 0.5, key, 2
    )
    assert torch.equal(way.decode(payloads, 4, key), torch.tensor([0.0, 0, 5, 0]))
    assert torch.equal(error, torch.tensor([3.0, 4, 0, 2]))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gather", Gather(codec("e3m0"))),
        ("reduce_scatter", ReduceScatter(codec("e3m0"), codec("e3m0"))),
        ("reduce_scatter:bf16", ReduceScatter(codec("e3m0"), codec("bf16"))),
        ("reduce_scatter:e3m0:block=64", ReduceScatter(codec("e3m0"), codec("e3m0:block=64"))),
    ],
)
def test_ways_are_known_by_name(spec, expected):
    way = combine_by(spec, codec("e3m0"))
    assert way == expected and combine_by(way.spec, codec("e3m0")) == way


@pytest.mark.parametrize(
    ("spec", "wire", "message"),
    [
        ("all_reduce", "e3m0", "combine='all_reduce' is neither gather nor reduce_scatter"),
        ("gather:bf16", "e3m0", "combine='gather:bf16' is neither"),
        ("reduce_scatter:fp8", "e3m0", "'fp8' is not a wire format"),
        ("reduce_scatter", "dare", "name another codec for them"),
    ],
)
def test_ways_that_do_not_exist_are_refused(spec, wire, message):
    with pytest.raises(ValueError, match=message):
        combine_by(spec, codec(wire))


def damaged_payloads(combine: str, replica: int, byte: int) -> str:
    model = torch.nn.Linear(300, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    exchange = diloco.ProcessGroupExchange(timeout_seconds=5)
    start = exchange.start

    def start_damaged(payloads, fragment, round, phase=0):
        if dist.get_rank() == replica and fragment >= 0:
            payloads = {m: payload.clone() for m, payload in payloads.items()}
            for payload in payloads.values():
                payload[byte] ^= 255
        return start(payloads, fragment, round, phase)

    exchange.start = start_damaged
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=1, num_fragments=1),
        combine=combine,
        exchange=exchange,
    )
    before = [p.clone() for p in model.parameters()]
    try:
        engine.step()
    except (PayloadError, diloco.ExchangeError) as error:
        assert all(map(torch.equal, before, model.parameters()))
        return f"{type(error).__name__}: {error}"
    return "no error"


REFUSED = "PayloadError: step 1: fragment 0, round 1: replica 1: a payload of"


def test_a_payload_with_a_wrong_header_is_refused_by_name_before_anything_is_merged():
    first, second = run_replicas(damaged_payloads, 2, "gather", 1, 0)
    assert first.startswith(f"{REFUSED} 301 elements in e3m0")
    assert second == "no error"


def test_a_share_with_a_wrong_header_is_refused_by_name_where_it_is_averaged():
    first, _ = run_replicas(damaged_payloads, 2, "reduce_scatter", 1, 5)
    assert first.startswith(f"{REFUSED} 151 elements in e3m0")


def reduce_while_the_first_replica_does_nothing(seconds: float) -> bool:
    exchange, way = diloco.ProcessGroupExchange(timeout_seconds=20), combine_by("reduce_scatter", codec("fp32"))
    key, delta = Key(0, 0, 1, exchange.replica), torch.full((5,), float(exchange.replica))
    pending = way.start(exchange, way.encode(delta, key, 2), 5, key)
    if exchange.replica == 0:
        time.sleep(seconds)  # a training loop that is busy with other things
        dist.barrier()
        pending.wait()
        return True
    start = time.monotonic()
    received = pending.wait()
    in_time = time.monotonic() - start < seconds / 2
    dist.barrier()
    total = torch.empty(5)
    way.total(received, total, key)
    return in_time and torch.equal(total, torch.full((5,), 0.5))


def test_the_second_phase_starts_by_itself():
    assert run_replicas(reduce_while_the_first_replica_does_nothing, 2, 6.0) == [True, True]


def reduce_without_the_last_replica() -> str:
    exchange, way = diloco.ProcessGroupExchange(timeout_seconds=2), combine_by("reduce_scatter", codec("fp32"))
    key = Key(0, 3, 2, exchange.replica)
    if exchange.replica == 2:
        time.sleep(5)
        return ""
    pending = way.start(exchange, way.encode(torch.ones(5), key, 3), 5, key)
    with pytest.raises(diloco.ExchangeError, match="fragment 3, round 2: no payload from or to") as caught:
        pending.wait()
    return str(caught.value.missing)


def test_a_replica_that_is_missing_in_either_phase_is_named():
    assert all("2" in missing for missing in run_replicas(reduce_without_the_last_replica, 3)[:2])
