import time

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas

import diloco
from diloco.engine.rounds import _exchange
from diloco.errors import PayloadError
from diloco.exchange.transport import Channel
from diloco.reduction import reduction_of
from diloco.reduction.cohort import Cohort
from diloco.wire import Key, codec


def damaged_payloads(combine: str, replica: int, byte: int) -> str:
    model = torch.nn.Linear(300, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    exchange = diloco.ProcessGroupExchange(timeout_seconds=5)
    start = exchange.start

    def start_damaged(payloads, tag):
        if dist.get_rank() == replica and tag.channel is Channel.PAYLOAD:
            payloads = {m: payload.clone() for m, payload in payloads.items()}
            for payload in payloads.values():
                payload[byte] ^= 255
        return start(payloads, tag)

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
    exchange, reduction = (
        diloco.ProcessGroupExchange(timeout_seconds=20),
        reduction_of("reduce_scatter", codec("fp32")),
    )
    cohort = Cohort.equal(2)
    key, delta = Key(0, 0, 1, exchange.replica), torch.full((5,), float(exchange.replica))
    pending = _exchange(exchange, reduction, reduction.encode(delta, key, cohort), 5, key, cohort)
    if exchange.replica == 0:
        time.sleep(seconds)  # a training loop that is busy with other things
        dist.barrier()
        pending.wait()
        return True
    start = time.monotonic()
    received = pending.wait()
    in_time = time.monotonic() - start < seconds / 2
    dist.barrier()
    average = reduction.average(received, torch.empty(5), key, cohort)
    return in_time and torch.equal(average.divided(), torch.full((5,), 0.5))


def test_the_second_phase_starts_by_itself():
    assert run_replicas(reduce_while_the_first_replica_does_nothing, 2, 6.0) == [True, True]


def reduce_without_the_last_replica() -> str:
    exchange, reduction = (
        diloco.ProcessGroupExchange(timeout_seconds=2),
        reduction_of("reduce_scatter", codec("fp32")),
    )
    cohort = Cohort.equal(3)
    key = Key(0, 3, 2, exchange.replica)
    if exchange.replica == 2:
        time.sleep(5)
        return ""
    pending = _exchange(exchange, reduction, reduction.encode(torch.ones(5), key, cohort), 5, key, cohort)
    with pytest.raises(diloco.ExchangeError, match="fragment 3, round 2: no payload from or to") as caught:
        pending.wait()
    return str(caught.value.missing)


def test_a_replica_that_is_missing_in_either_phase_is_named():
    assert all("2" in missing for missing in run_replicas(reduce_without_the_last_replica, 3)[:2])
