"""One replica fails, or ends early: the others are told. Legend: see tests/engine/cases.py."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step
from tests.ports import free_port
from tests.processes import run_replicas
from torch import nn

import diloco
from diloco.exchange import notices
from diloco.exchange.encrypted import tls
from diloco.exchange.notices import Notices
from diloco.exchange.process_group import Messages
from diloco.exchange.transport import Channel, Tag, Transport

TIMEOUT_SECONDS = 600.0
"""More than `run_replicas` waits."""


def exchange() -> diloco.ProcessGroupExchange:
    """Over the process group, or, without one, by address; its notices are seen soon."""
    notices._SECONDS_BETWEEN_LOOKS = 0.05
    if dist.is_initialized():
        return diloco.ProcessGroupExchange(timeout_seconds=TIMEOUT_SECONDS)
    return diloco.connect(timeout_seconds=TIMEOUT_SECONDS)


def fail(how: str, combine: str) -> str:
    """The error of a replica, of which the last one fails; nobody waits as long as the time limit."""
    case, way = Case(P=2, H=4, tau=2, combine=combine), exchange()
    fails = way.replica == way.num_replicas - 1
    model = case.model()
    with pytest.raises(diloco.DilocoError) as caught:
        if fails and how == "constructor":
            case.engine(model, exchange=way, mixing=2.0)
        engine = case.engine(model, exchange=way)
        for t in range(1, 100 if how != "uneven steps" or not fails else 6):
            inner_step(model, way.replica, t)
            if fails and how == "not finite" and t == 7:
                nn.init.constant_(model.blocks[1].bias, float("nan"))
            engine.step()
        engine.finish()
    return str(caught.value)


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
    *others, message = run_replicas(fail, 3, how, combine, joined=joined)
    assert reason in message
    for message in others:
        assert f"replica 2 failed: {reason}" in message


@pytest.mark.parametrize("joined", [True, False])
def test_uneven_numbers_of_steps_end_in_both_counts(joined):
    for message in run_replicas(fail, 2, "uneven steps", "gather", joined=joined):
        assert (
            "replica 1 called finish() after step 5, and this replica waits for what is sent after step 6"
            in message
        )


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
        assert "number of inner steps at finish(): replica 0 has 5, replica 1 has 6; let all" in message


@pytest.mark.parametrize("has_finished_before", [False, True])
def test_the_notice_of_an_earlier_finish_stops_nobody(has_finished_before):
    store, reasons = dist.HashStore(), []
    mine, theirs = (Notices(store, replica, 2, 2) for replica in range(2))
    wait = SimpleNamespace(tag=Tag(Channel.PAYLOAD, step=12), interrupt=reasons.append)
    if has_finished_before:
        with mine.finishing(8):
            pass
    with theirs.finishing(8), mine.watching(wait):
        mine.look()
    assert bool(reasons) != has_finished_before


def test_a_store_that_is_gone_is_looked_at_once():
    looks = []

    def check(keys: list[str]) -> bool:
        looks.append(keys)
        raise RuntimeError("Broken pipe")

    mine = Notices(SimpleNamespace(check=check), 1, 2, 2)
    payloads, cpu = {0: torch.zeros(9, dtype=torch.uint8)}, torch.device("cpu")
    messages = Messages(payloads, cpu, Tag(Channel.PAYLOAD), 5.0, mine, None)
    with messages.blaming(0):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(diloco.ExchangeError, match="its process has ended"):
        messages.wait()
    assert len(looks) == 1


def interrupt_what_has_come() -> list[int]:
    """A wait that is interrupted after its message has come: the first of two, and the second is here."""
    way = exchange()
    other, payload = 1 - way.replica, torch.full((9,), way.replica, dtype=torch.uint8)
    first, second = (way.start({other: payload}, Tag(Channel.PAYLOAD, 0, n)) for n in (1, 2))
    second.wait()
    first.interrupt("it is in vain")
    return first.wait()[other].tolist()


@pytest.mark.parametrize("joined", [True, False])
def test_an_interruption_takes_no_message_away(joined):
    assert run_replicas(interrupt_what_has_come, 2, joined=joined) == [[1] * 9, [0] * 9]


def wait_behind_a_leader() -> str:
    """The error of a process of replica 0 or 1, of two each, when replica 2 fails; its connections are closed."""
    notices._SECONDS_BETWEEN_LOOKS = 0.05
    replica, rank = divmod(int(os.environ["DILOCO_REPLICA"]), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    way = diloco.connect(replica=replica, num_replicas=3, leader=True, timeout_seconds=TIMEOUT_SECONDS)
    payloads = {other: torch.ones(9, dtype=torch.uint8) for other in {0, 1, 2} - {replica}}
    first = way.start(payloads, Tag(Channel.PAYLOAD, 0, 1))
    if replica == 2:
        first.wait()  # all are connected: nobody leaves while others connect
        if rank == 0:
            way.abort("it is the test's")
        return "replica 2 failed"
    with pytest.raises(diloco.ExchangeError) as caught:
        first.wait()  # which a slow process may still do when replica 2 fails
        way.start(payloads, Tag(Channel.PAYLOAD, 0, 2, step=1)).wait()
    return str(caught.value)


def test_the_processes_behind_a_leader_are_told_too():
    assert all("replica 2 failed" in message for message in run_replicas(wait_behind_a_leader, 6, joined=False))


def end_amid_a_payload(secret: str | None) -> tuple[tuple[int, ...], str]:
    """The replicas that are missing when replica 1 ends, and a part of its payload has come; and the error.

    None are if all of it has come before replica 1 gets the processor.
    """
    notices._SECONDS_BETWEEN_LOOKS, tls._COST["n"] = 0.05, 1 << 10
    way = diloco.connect(timeout_seconds=TIMEOUT_SECONDS, secret=secret)
    payloads = {1 - way.replica: torch.ones(1 << 27, dtype=torch.uint8)}
    way.start({1 - way.replica: torch.ones(1, dtype=torch.uint8)}, Tag(Channel.PAYLOAD, 0, 1)).wait()
    messages = way.start(payloads, Tag(Channel.PAYLOAD, 0, 2))
    if way.replica == 1:
        while not messages.incoming[0][0]:
            time.sleep(0.001)
        os._exit(1)
    try:
        messages.wait()
    except diloco.ExchangeError as error:
        return error.missing, str(error)
    return (), ""


@pytest.mark.parametrize("secret", [None, "correct horse battery staple"])
def test_a_replica_that_ends_amid_its_payload_is_missed_at_once(secret):
    results = (run_replicas(end_amid_a_payload, 2, secret, joined=False, mortal=(1,))[0] for _ in range(5))
    missing, message = next((result for result in results if result[0]), ((), ""))
    assert missing == (1,) and "no payload from or to replica 1 (its process has ended, or" in message


WAITING_IN_A_THREAD = """
import sys, time, torch, diloco
from tests.exchange.test_notices import engine_that_waits_in_a_thread
exchange = diloco.connect(timeout_seconds=600)
engine = engine_that_waits_in_a_thread(exchange)
engine.step()
while not exchange._notices._waiting:  # for replica 1, in a thread
    time.sleep(0.01)
sys.exit(7)
"""


def engine_that_waits_in_a_thread(transport: Transport) -> diloco.StreamingDiLoCo:
    """An engine one step before it sends: after that step a thread waits for what it relays."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    settings = {"combine": "reduce_scatter", "sync_every": 2, "overlap_steps": 1}
    engine = diloco.StreamingDiLoCo(model, fragments=diloco.whole(model), exchange=transport, **settings)
    engine.step()
    return engine


@pytest.mark.slow
def test_a_process_that_ends_while_a_thread_of_it_waits_keeps_its_exit_code():
    address = f"127.0.0.1:{free_port()}"
    place = {"DILOCO_ADDRESS": address, "DILOCO_REPLICA": "0", "DILOCO_NUM_REPLICAS": "2"}
    process = subprocess.Popen([sys.executable, "-c", WAITING_IN_A_THREAD], env=os.environ | place)
    silent = diloco.connect(address, replica=1, num_replicas=2, timeout_seconds=60)
    engine_that_waits_in_a_thread(silent)
    assert process.wait(60) == 7
    silent.close()
