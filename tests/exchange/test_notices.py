"""One replica fails, or ends early: the others are told. Legend: see tests/engine/cases.py."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from tests.engine.cases import Case, inner_step
from tests.ports import free_port
from tests.processes import run_replicas
from torch import nn

import diloco

CASE = Case(P=2, H=4, tau=2, T=20)
TIMEOUT_SECONDS = 600.0


def exchange() -> diloco.ProcessGroupExchange:
    """Over the process group, or, without one, by address."""
    if dist.is_initialized():
        return diloco.ProcessGroupExchange(timeout_seconds=TIMEOUT_SECONDS)
    return diloco.connect(timeout_seconds=TIMEOUT_SECONDS)


def fail(how: str, combine: str) -> tuple[str, float]:
    """The error of a replica, and how long it took after another's; the last one fails."""
    case, way = Case(P=2, H=4, tau=2, combine=combine), exchange()
    fails = way.replica == way.num_replicas - 1
    model = case.model()
    start = time.monotonic()
    with pytest.raises(diloco.DilocoError) as caught:
        if fails and how == "constructor":
            time.sleep(0.7)  # the others wait already
            case.engine(model, exchange=way, mixing=2.0)
        engine = case.engine(model, exchange=way)
        for t in range(1, 100 if how != "uneven steps" or not fails else 6):
            start = time.monotonic()
            inner_step(model, way.replica, t)
            if fails and how == "not finite" and t == 7:
                time.sleep(0.7)
                nn.init.constant_(model.blocks[1].bias, float("nan"))
            engine.step()
        start = time.monotonic()
        engine.finish()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("how", "combine", "reason"),
    [
        ("not finite", "gather", "step 10: the outer gradient of blocks.1.bias"),
        ("not finite", "reduce_scatter", "step 10: the outer gradient of blocks.1.bias"),
        ("constructor", "gather", "mixing must lie between 0 and 1"),
    ],
)
def test_the_others_are_told_at_once_what_and_where(how, combine, reason, joined):
    *others, (message, _) = run_replicas(fail, 3, how, combine, joined=joined)
    assert reason in message
    for message, seconds in others:
        assert f"replica 2 failed: {reason}" in message
        assert seconds < 10, "not TIMEOUT_SECONDS"


@pytest.mark.parametrize("joined", [True, False])
def test_uneven_numbers_of_steps_end_in_both_counts(joined):
    for message, seconds in run_replicas(fail, 2, "uneven steps", "gather", joined=joined):
        assert (
            "replica 1 called finish() after step 5, and this replica waits for what is sent after step 6"
            in message
        )
        assert seconds < 10


def finish_unevenly() -> str:
    """No payload is missed: both have sent and merged what was due."""
    case = Case(P=1, H=4, tau=0)
    model = case.model()
    engine = case.engine(model, exchange=exchange())
    for t in range(1, 6 + dist.get_rank()):
        inner_step(model, dist.get_rank(), t)
        engine.step()
    with pytest.raises(diloco.DilocoError) as caught:
        engine.finish()
    return str(caught.value)


def test_finish_compares_the_steps():
    for message in run_replicas(finish_unevenly, 2):
        assert "number of inner steps at finish(): replica 0 has 5, replica 1 has 6" in message


def finish_twice() -> str:
    model = CASE.model()
    way = exchange()
    engine = CASE.engine(model, exchange=way)
    for until in (9, 23):
        for t in range(engine.num_steps + 1, until):
            inner_step(model, way.replica, t)
            if way.replica == 1 and t == 10:
                time.sleep(1.2)  # the other looks at notices meanwhile, the first finish's among them
            engine.step()
        engine.finish()
    return engine.outer_hash()


def test_the_notice_of_an_earlier_finish_stops_nobody():
    assert len(set(run_replicas(finish_twice, 2))) == 1


WAITING_IN_A_THREAD = """
import sys, time, torch, diloco
exchange = diloco.connect(timeout_seconds=600)
model = torch.nn.Linear(4, 1)
torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
engine = diloco.StreamingDiLoCo(
    model, fragments=diloco.whole(model), schedule=diloco.Schedule(sync_every=2, num_fragments=1, overlap_steps=1),
    combine="reduce_scatter", exchange=exchange,
)
engine.step()
if exchange.replica == 0:
    engine.step()  # starts to wait for replica 1, in a thread
    time.sleep(0.5)
    sys.exit(7)
time.sleep(8)
"""


def test_a_process_that_ends_while_a_thread_of_it_waits_keeps_its_exit_code():
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING_IN_A_THREAD],
            env=os.environ
            | {"DILOCO_ADDRESS": address, "DILOCO_REPLICA": str(replica), "DILOCO_NUM_REPLICAS": "2"},
        )
        for replica in range(2)
    ]
    assert processes[0].wait(60) == 7
    processes[1].kill()
    processes[1].wait()
