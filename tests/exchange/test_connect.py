"""Replicas that are jobs of their own. Legend: see tests/engine/cases.py."""

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, run_cases, train
from tests.ports import free_port
from tests.processes import init_group, run_replicas, wait_for_end, wait_for_files
from tests.sockets import listening
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.exchange import connect as connecting
from diloco.exchange import meeting
from diloco.exchange.encrypted import tls
from diloco.exchange.transport import Channel, Tag, share, wait_for_all

CASE = Case(P=3, H=5, tau=2, wire="e3m0")
SHARES = Case(P=2, H=4, tau=3, wire="int4", combine="reduce_scatter:bf16")
# Kept until this process ends, long after its own part is over.
HELD: list[object] = []


def train_connected(case: Case, num_connections: int) -> str:
    exchange = diloco.connect(timeout_seconds=20, num_connections=num_connections)
    assert not dist.is_initialized()
    model = case.model()
    engine = case.engine(model, exchange=exchange)
    for _ in train(engine, model, case.T):
        pass
    return engine.outer_hash()


@pytest.mark.parametrize(("case", "num_replicas", "num_connections"), [(CASE, 3, 1), (SHARES, 2, 2)])
def test_replicas_of_one_process_train_as_in_a_process_group(case, num_replicas, num_connections):
    connected = run_replicas(train_connected, num_replicas, case, num_connections, joined=False)
    grouped = [results[0][1] for results in run_replicas(run_cases, num_replicas, [case])]
    assert set(connected) == set(grouped)


def train_with_ddp(folder: str) -> tuple[str, float]:
    """One of four processes: two sites of two, each with a group of its own for DDP."""
    number = int(os.environ["DILOCO_REPLICA"])
    replica, rank = divmod(number, 2)
    Path(folder, str(replica)).mkdir(parents=True, exist_ok=True)
    init_group(f"{folder}/{replica}", rank, 2)
    exchange = diloco.connect(replica=replica, num_replicas=2, timeout_seconds=20)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=4, num_fragments=1, overlap_steps=2),
        exchange=exchange,
    )
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine.attach(optimizer)
    data = torch.Generator().manual_seed(number)
    for _ in range(30):
        inputs = torch.randn(16, 8, generator=data)
        loss = (wrapped(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    engine.finish()
    everyones = [torch.zeros(2) for _ in range(2)]
    mine = torch.tensor([p.detach().sum() for p in (model[0].weight, model[2].weight)])
    dist.all_gather(everyones, mine)
    assert torch.equal(*everyones), "the processes of a replica hold the same parameters"
    return engine.outer_hash(), loss.item()


@pytest.mark.slow
def test_two_sites_with_ddp_inside_train_one_model(tmp_path):
    """With a leader, see tests/test_examples.py."""
    results = run_replicas(train_with_ddp, 4, str(tmp_path), joined=False)
    assert len({outer_hash for outer_hash, _ in results}) == 1
    assert all(loss < 1.0 for _, loss in results), "the variance of the target is 8"


def exchange_by_leaders(secret: str | None) -> None:
    """Payloads of three replicas of two processes: each pair of replicas has a length of its own."""
    tls._COST["n"] = 1 << 10  # the tests of peers take the whole time
    replica, rank = divmod(int(os.environ["DILOCO_REPLICA"]), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    exchange = diloco.connect(replica=replica, num_replicas=3, leader=True, secret=secret, timeout_seconds=20)

    def payload(sender: int, receiver: int) -> torch.Tensor:
        return torch.full((10 + sender + receiver,), 10 * sender + receiver, dtype=torch.uint8)

    others = {0, 1, 2} - {replica}
    mine = {other: payload(replica, other) for other in others}
    for pending in [exchange.start(mine, Tag(Channel.PAYLOAD, p, 1)) for p in range(2)]:
        received = pending.wait()
        assert received.keys() == others
        assert all(torch.equal(received[other], payload(other, replica)) for other in others)
    share(exchange, "all have received")


@pytest.mark.parametrize("secret", [None, pytest.param("correct horse battery staple", marks=pytest.mark.slow)])
def test_a_leader_hands_on_what_each_replica_sent(secret):
    run_replicas(exchange_by_leaders, 6, secret, joined=False)


def differ_from_the_leader() -> str:
    """The second process of replica 1 starts from parameters of its own."""
    number = int(os.environ["DILOCO_REPLICA"])
    replica, rank = divmod(number, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    exchange = diloco.connect(replica=replica, num_replicas=2, leader=True, timeout_seconds=20)
    case = Case(P=1, seed=int(number == 3))
    with pytest.raises((diloco.DisagreementError, diloco.ExchangeError)) as caught:
        model = case.model()
        engine = case.engine(model, exchange=exchange)
        for _ in train(engine, model, case.T):
            pass
    return str(caught.value)


def test_a_process_that_differs_from_its_leader_is_named():
    for message in run_replicas(differ_from_the_leader, 4, joined=False):
        assert "process 1 of replica 1 has other settings, another model or other initial parameters" in message


def end_beside_the_leader(folder: str) -> tuple[str, tuple[int, ...]] | None:
    """The error of the leader of replica 1, whose other process has ended."""
    replica, rank = divmod(int(os.environ["DILOCO_REPLICA"]), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    exchange = diloco.connect(replica=replica, num_replicas=2, leader=True, timeout_seconds=20)
    share(exchange, "all have connected")
    if replica == 0:
        return None
    if rank == 1:
        Path(folder, "new").write_text(str(os.getpid()))
        Path(folder, "new").rename(Path(folder, "pid"))
        os._exit(1)
    wait_for_files(Path(folder, "pid"))
    wait_for_end(int(Path(folder, "pid").read_text()))
    with pytest.raises(diloco.ExchangeError) as caught:
        share(exchange, "this process is alone")
    return str(caught.value), caught.value.missing


def test_a_process_that_has_ended_is_named_by_its_leader(tmp_path):
    message, missing = run_replicas(end_beside_the_leader, 4, str(tmp_path), joined=False, mortal=(3,))[2]
    assert message.startswith("comparing settings: no payload from or to process 1 of this replica (")
    assert missing == (), "no replica is missing"


def connect_again(secret: str | None, leader: bool, first_to_close: int) -> set[str]:
    """Train, close, one replica later than the other, and train anew at the same address."""
    hashes, tls._COST["n"] = set(), 1 << 10
    for _ in range(2):
        exchange = diloco.connect(secret=secret, leader=leader, timeout_seconds=20)
        model = CASE.model()
        engine = CASE.engine(model, exchange=exchange)
        for _ in train(engine, model, CASE.T):
            pass
        hashes.add(engine.outer_hash())
        if exchange.replica != first_to_close:
            time.sleep(0.3)
        exchange.close()
    return hashes


@pytest.mark.parametrize(
    ("secret", "leader", "first_to_close"),
    [(None, False, 0), (None, True, 1), ("correct horse battery staple", False, 1)],
)
def test_replicas_that_have_closed_connect_again(secret, leader, first_to_close):
    one, other = run_replicas(connect_again, 2, secret, leader, first_to_close, joined=False)
    assert one == other and len(one) == 1


def test_a_second_meeting_that_fails_says_why(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(meeting, "_HAVE_MET", {address})
    monkeypatch.setattr(connecting, "_InTheClear", lambda *_: raising("replica 0 has a secret"))
    with pytest.raises(diloco.ExchangeError, match="replica 0 has a secret"):
        diloco.connect(address, replica=1, num_replicas=2, timeout_seconds=0.2)


def raising(message: str) -> None:
    raise diloco.ExchangeError(message)


def start_differently() -> str:
    leader = os.environ["DILOCO_REPLICA"] == "1"
    with pytest.raises(diloco.UserError) as caught:
        diloco.connect(leader=leader, timeout_seconds=10)
    HELD.append(caught)  # with replica 0's store, from which the other reads
    return str(caught.value)


def test_replicas_that_were_started_differently_are_told_so():
    messages = run_replicas(start_differently, 2, joined=False)
    assert messages == [
        f"replica {mine} was started with leader={mine == 1}, and replica {1 - mine} with leader={mine == 0}: "
        "start all with the same"
        for mine in range(2)
    ]


def come_twice() -> str:
    os.environ["DILOCO_REPLICA"] = str(min(int(os.environ["DILOCO_REPLICA"]), 1))
    os.environ["DILOCO_NUM_REPLICAS"] = "2"
    try:
        exchange = diloco.connect(timeout_seconds=10)
    except diloco.UserError as error:
        return str(error)
    HELD.append(exchange)
    return str(exchange.num_replicas)


def test_a_replica_that_has_come_already_is_refused():
    first, *others = run_replicas(come_twice, 3, joined=False)
    assert first == "2"
    assert any("process 0 of replica 1 has come" in message for message in others)


def test_a_job_that_spans_replicas_is_refused():
    for message in run_replicas(one_job_of_two_replicas, 2, joined=False):
        assert "are processes of one job" in message and "start one torchrun per replica" in message


def one_job_of_two_replicas() -> str:
    """Both replicas in one job of one process each: as `torchrun --nproc-per-node 2` would start them."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    with pytest.raises(diloco.UserError) as caught:
        diloco.connect(timeout_seconds=10)
    HELD.append(caught)
    return str(caught.value)


def test_a_job_whose_launcher_sets_no_rank_is_refused_too(tmp_path):
    message = run_replicas(one_job_without_rank, 2, free_port(), str(tmp_path), joined=False)[1]
    assert "replicas 1 and 0 are processes of one job" in message


def one_job_without_rank(port: int, folder: str) -> str:
    """Both replicas are processes of one group, as Lightning's launcher starts them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=int(os.environ["DILOCO_REPLICA"]), world_size=2)
    return error_of_connect(folder)


def test_jobs_of_two_machines_with_one_host_name_are_two(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    names = []
    for machine in ("one", "other"):
        (tmp_path / machine).write_text(f"{machine}\n")
        monkeypatch.setattr(meeting, "_BOOT", tmp_path / machine)
        names.append(meeting._job())
    assert len(set(names)) == 2 and meeting._job() == names[1]


def error_of_connect(folder: str, *, seconds: float = 20.0, **arguments: str | None) -> str:
    """The error of a replica; replica 0 waits until the other has ended, and no longer."""
    ended = Path(folder, "has ended")

    def wait(missing, *, seconds: float, **how: Any) -> None:
        while missing():
            if ended.exists():
                wait_for_all(missing, seconds=0.0, **how)
            time.sleep(0.01)

    is_first = os.environ["DILOCO_REPLICA"] == "0"
    if is_first:
        meeting.wait_for_all = wait
    with pytest.raises(diloco.DilocoError) as caught:
        diloco.connect(timeout_seconds=seconds, **arguments)
    if not is_first:
        time.sleep(0.2)  # until replica 0's door has noted the refusal
        ended.touch()
    return str(caught.value)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_start_that_waits_says_for_whom_and_ends(replica, caplog, monkeypatch):
    def wait(missing, *, begin: float, **how: Any) -> None:
        """Wait as long as if the store had been there at once."""
        wait_for_all(missing, begin=time.monotonic(), **how)

    monkeypatch.setattr("diloco.exchange.transport.SECONDS_OF_SILENCE", 0.0)
    monkeypatch.setattr(meeting, "wait_for_all", wait)
    address = f"127.0.0.1:{free_port()}"
    missing = f"replica {1 - replica}"
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(diloco.ExchangeError, match=f"{missing} did not arrive at"),
    ):
        diloco.connect(address, replica=replica, num_replicas=2, timeout_seconds=0.3)
    assert any(line.startswith(f"waiting for {missing} at {address}, up to 0") for line in caplog.messages)


def test_a_name_that_means_this_machine_alone_is_warned_of(caplog, monkeypatch):
    """Debian's /etc/hosts gives a machine's own name the address 127.0.1.1."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **kwargs: resolve("127.0.1.1" if host == "alpha" else host, *args, **kwargs),
    )
    for host in ("alpha", "localhost", "127.0.0.1"):
        with pytest.raises(diloco.ExchangeError, match="replica 1 did not arrive"):
            diloco.connect(f"{host}:{free_port()}", replica=0, num_replicas=2, timeout_seconds=0.1)
    assert [line[:23] for line in caplog.messages if "no other machine reaches" in line] == [
        "alpha is 127.0.1.1 here"
    ]


def test_what_a_launcher_left_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(diloco.ExchangeError, match=r"replica 0 did not arrive .* RANK=1 and WORLD_SIZE=2"):
        diloco.connect(f"127.0.0.1:{free_port()}", replica=0, num_replicas=2, timeout_seconds=0.3)


def test_one_replica_alone_has_nobody_to_meet():
    assert diloco.connect("nowhere:1", replica=0, num_replicas=1).num_replicas == 1


def addresses_of_a_replica() -> tuple[set[str], bool]:
    """The addresses on which this replica listens while it is connected, and True if replica 0's port is one."""
    port = int(os.environ["DILOCO_ADDRESS"].rpartition(":")[2])
    exchange = diloco.connect(f"127.0.0.2:{port}", timeout_seconds=20, num_connections=2)
    sockets = listening(os.getpid())
    assert exchange.num_replicas == 2, "it lives until here"
    return {str(address) for address, _ in sockets}, port in {port for _, port in sockets}


def test_connect_listens_on_the_interface_of_its_address_alone():
    (of_the_first, has_port), (of_the_second, _) = run_replicas(addresses_of_a_replica, 2, joined=False)
    assert of_the_first == {"127.0.0.2"} and has_port
    assert of_the_second <= {"127.0.0.1", "127.0.0.2"}, "the addresses of the same interface"
