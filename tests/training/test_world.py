"""The processes of a run meet at a store and say who has not come; what they believe of each other."""

import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch.distributed as dist
from tests.ports import free_port
from tests.processes import run_replicas, wait_for_files

from diloco.errors import DisagreementError, ExchangeError, UserError
from diloco.exchange import transport
from diloco.training import world
from diloco.training.config.recipes import recipe, tiny
from diloco.training.processes import STORE
from diloco.training.world import _agree_on_groups, join, store_with_all


class Trap:
    """An object whose pickle makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def join_a_rogue(trap: Path) -> None:
    """Process 1 was started with another setting, and then sends a pickle."""
    is_rogue = dist.get_rank() == 1
    numbers = {"num_replicas": 2, "shards_per_replica": 1, "ddp_per_replica": 1, "num_connections": 1}
    with pytest.raises(DisagreementError, match=r"process 0 has \(2, 1, 1, 1\), process 1 has \(2, 1, 1, 3\)"):
        _agree_on_groups(numbers | {"num_connections": 3 if is_rogue else 1})
    if is_rogue:
        dist.all_gather_object([None, None], Trap(trap))  # gloo ends this process: the others expect less
    with pytest.raises((RuntimeError, DisagreementError), match=r"gloo|disagree"):  # the pickle's length, at most
        _agree_on_groups(numbers)


@pytest.mark.parametrize(
    ("changes", "world_size", "sentence"),
    [
        ({}, 1, "started 1 process, and num_replicas=2 needs 2: have it start 2, or set num_replicas=1"),
        (
            {"shards_per_replica": 2},
            6,
            "num_replicas=2 with shards_per_replica=2 needs 4: have it start 4, or set num_replicas=3",
        ),
        ({"shards_per_replica": 2}, 3, "with shards_per_replica=2 needs 4: have it start 4"),
        (
            {"shards_per_replica": 2, "rendezvous": "store"},
            4,
            "started 4 processes with rendezvous=store, .* shards_per_replica=2: set it to 4",
        ),
    ],
)
def test_a_launcher_of_another_number_of_processes_is_refused(changes, world_size, sentence, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=f"{sentence}$"), join(replace(recipe("tiny"), **changes)):
        pass


def test_what_another_process_sends_is_never_run(tmp_path):
    run_replicas(join_a_rogue, 2, tmp_path / "trap", mortal=(1,))
    assert not (tmp_path / "trap").exists()


def arrive(port: int, late_rank: int, silence: float, folder: str, awaited: list[str]) -> list[str]:
    """Come to the store, one process late, after sentences of the others; those that this one logged meanwhile."""
    rank = int(os.environ["DILOCO_REPLICA"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    transport.SECONDS_OF_SILENCE = silence
    sentences: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        sentences.append(record.getMessage().partition(", up to ")[0])
        Path(folder, f"{rank}: {sentences[-1]}").touch()

    def connected(*args: Any, **kwargs: Any) -> dist.Store:
        store = tcp_store(*args, **kwargs)
        if late_rank != 0:
            sentences.clear()  # the first process may have listened a moment later
        return store

    handler.emit = emit
    logging.getLogger("diloco").addHandler(handler)
    tcp_store, dist.TCPStore = dist.TCPStore, connected
    if rank == late_rank:
        time.sleep(0.3)
        wait_for_files(*(Path(folder, sentence) for sentence in awaited))
    store = store_with_all(rank=rank, world_size=3, name_of="replica {}".format, timeout_seconds=20)
    store.set(f"ready/{rank}", "")
    if rank == 0:  # whose process holds the store
        store.wait([f"ready/{other}" for other in range(3)])
    return sentences


@pytest.mark.parametrize(
    ("late", "silence", "expected"),
    [
        (2, 0.2, {0: ["waiting for replica 2"], 1: ["waiting for replica 2"], 2: []}),
        (0, 0.2, {replica: ["waiting for replica 0 at 127.0.0.1, port {}"] for replica in (1, 2)}),
        (2, 9.0, {0: [], 1: [], 2: []}),
    ],
)
def test_it_is_said_who_has_not_come(late, silence, expected, tmp_path):
    port = free_port()
    expected = {replica: [one.format(port) for one in sentences] for replica, sentences in expected.items()}
    awaited = [f"{replica}: {one}" for replica, sentences in expected.items() for one in sentences]
    logged = run_replicas(arrive, 3, port, late, silence, str(tmp_path), awaited, joined=False)
    for replica, sentences in expected.items():
        # Another one may be late, too, where the computer is busy.
        assert {*sentences} <= {*logged[replica]} and (silence < 1 or not logged[replica])


def arrive_again(rank: int, marks: list[str], begin: Barrier) -> list[str]:
    """Come to the store once and mark it, and once more a moment after the first process; the marks seen there."""
    seen: list[str] = []
    for attempt in (0, 1):
        begin.wait()
        if attempt == 1 and rank == 1:
            time.sleep(0.3)
            marks.append("process 1 comes")
        store = store_with_all(rank=rank, world_size=2, name_of=str, timeout_seconds=20)
        seen += [*marks, *(["a mark"] if store.check(["mark"]) else [])]
        begin.wait()
        store.set("mark", "")
    return seen


def test_processes_that_are_started_again_meet_anew_at_the_same_store(monkeypatch):
    """torchrun's own process holds the store, and restarts the others on every machine by a count of its own."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv(STORE, raising=False)
    begin, marks = Barrier(2, timeout=20), []
    with ThreadPoolExecutor(2) as pool:
        seen = [*pool.map(arrive_again, (0, 1), (marks, marks), (begin, begin))]
    assert seen == [["process 1 comes"]] * 2


def alone(monkeypatch, port: int) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    store_with_all(rank=0, world_size=2, name_of="replica {}".format, timeout_seconds=1)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MASTER_PORT": "29500"}, "RANK is set in the environment, but MASTER_ADDR is missing: use torchrun"),
        ({}, "RANK is set in the environment, but MASTER_ADDR and MASTER_PORT are missing: use torchrun"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "b"}, "MASTER_PORT='b' in the environment is no port: use torchrun"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT='65536' in the environment is no port: .*"),
    ],
)
def test_an_environment_without_an_address_is_told_what_is_missing(monkeypatch, environment, sentence):
    for name in ("MASTER_ADDR", "MASTER_PORT", STORE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        store_with_all(rank=0, world_size=2, name_of="replica {}".format, timeout_seconds=0.3)


def test_a_run_that_is_joined_names_who_is_missing(monkeypatch):
    environment = {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv(STORE, raising=False)
    config = replace(tiny(), timeout_seconds=1.0)
    with (
        pytest.raises(ExchangeError, match=r"^replica 1 did not arrive within 1 s: start the replicas"),
        world.join(config),
    ):
        pass


def test_a_port_in_use_is_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^port {port} of 127\.0\.0\.1 is in use: set MASTER_PORT"):
            alone(monkeypatch, port)
