"""The processes of a run meet at a store, and say who has not come."""

import logging
import os
import socket
import time

import pytest
from tests.ports import free_port
from tests.processes import run_replicas

from diloco.errors import UserError
from diloco.training import waiting
from diloco.training.launcher import STORE
from diloco.training.waiting import store_with_all


def arrive(port: int, late_rank: int, silence: float) -> list[str]:
    """Come to the store, one process late; the sentences that this one logged meanwhile."""
    rank = int(os.environ["DILOCO_REPLICA"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    waiting._SECONDS_OF_SILENCE = silence
    sentences: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())
    logging.getLogger("diloco").addHandler(handler)
    if rank == late_rank:
        time.sleep(1.0)
    store = store_with_all(rank=rank, world_size=3, name_of="replica {}".format, timeout_seconds=20)
    store.set(f"ready/{rank}", "")
    if rank == 0:  # whose process holds the store
        store.wait([f"ready/{other}" for other in range(3)])
    return sentences


@pytest.mark.parametrize(
    ("late", "silence", "expected"),
    [
        (2, 0.2, {0: ["waiting for replica 2 …"], 1: [], 2: []}),
        (0, 0.2, {replica: ["waiting for replica 0 at 127.0.0.1, port {} …"] for replica in (1, 2)}),
        (2, 9.0, {0: [], 1: [], 2: []}),
    ],
)
def test_it_is_said_who_has_not_come(late, silence, expected):
    port = free_port()
    logged = run_replicas(arrive, 3, port, late, silence, joined=False)
    for replica, sentences in expected.items():
        # Another one may be late, too, where the computer is busy.
        assert logged[replica][-1:] == [sentence.format(port) for sentence in sentences]


def alone(monkeypatch, port: int) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    store_with_all(rank=0, world_size=2, name_of="replica {}".format, timeout_seconds=0.3)


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


def test_whoever_does_not_come_in_time_is_named(monkeypatch):
    with pytest.raises(TimeoutError, match=r"^replica 1 did not come within 0\.3 s: start the replicas"):
        alone(monkeypatch, free_port())


def test_a_port_in_use_is_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^port {port} of 127\.0\.0\.1 is in use: set MASTER_PORT"):
            alone(monkeypatch, port)
