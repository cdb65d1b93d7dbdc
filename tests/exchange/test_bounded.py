"""Waits for a replica 0 that stands still (SIGSTOP), or has ended, are over in time."""

import os
import re
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.processes import run_replicas, wait_for_files

import diloco
from diloco.exchange import connect as connecting
from diloco.exchange import notices
from diloco.exchange.meeting import Meeting
from diloco.exchange.notices import within
from diloco.exchange.transport import Channel, Tag

TIMEOUT_SECONDS = 1.0
SECRET = "correct horse battery staple"


def test_a_call_that_takes_too_long_is_left_alone():
    release = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.2, release.wait, 60)
    release.set()


def test_a_call_returns_and_raises_as_it_does_without_a_bound():
    assert within(60, max, 1, -2, key=abs) == -2
    with pytest.raises(ZeroDivisionError):
        within(60, divmod, 1, 0)


def end(how: str, folder: str) -> None:
    """End this process, or let it stand still until replica 1 kills it."""
    Path(folder, "new").write_text(str(os.getpid()))
    Path(folder, "new").rename(Path(folder, "pid"))
    if how == "ends":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGSTOP)


def pid_of_the_first(folder: str) -> int:
    wait_for_files(Path(folder, "pid"))
    return int(Path(folder, "pid").read_text())


def start_in_vain(moment: str, how: str, secret: str | None, folder: str) -> tuple[str, tuple[int, ...], float]:
    """The error of replica 1, while replica 0 goes no further than to some moment of the start."""
    is_first, wait_for, open_store = os.environ["DILOCO_REPLICA"] == "0", Meeting._wait_for, Meeting.open

    def wait_at_the_end(meeting: Meeting, store: object, replica: int, rank: int) -> None:
        if is_first:
            Path(folder, "has come").touch()
        if moment == "comparing" and replica == 2:
            end(how, folder) if is_first else pid_of_the_first(folder)
        wait_for(meeting, store, replica, rank)

    def open_and_end(meeting: Meeting, seconds: float) -> object:
        opened = open_store(meeting, seconds)
        if moment == "listening":
            end(how, folder)
        return opened

    Meeting._wait_for = wait_at_the_end
    if is_first:
        Meeting.open, connecting._exchange = open_and_end, lambda *_: end(how, folder)
    else:
        wait_for_files(Path(folder, "pid" if moment == "listening" else "has come"))
    start = time.monotonic()
    with pytest.raises(diloco.ExchangeError) as caught:
        diloco.connect(
            num_replicas=2 if moment == "connecting" else 3,
            timeout_seconds=20 if is_first else TIMEOUT_SECONDS,
            secret=secret,
        )
    seconds = time.monotonic() - start
    if how == "stops":
        os.kill(pid_of_the_first(folder), signal.SIGKILL)
    return str(caught.value), caught.value.missing, seconds


@pytest.mark.parametrize(
    ("moment", "how", "secret", "sentence"),
    [
        ("listening", "stops", None, "replica 0 listens at .* and does not answer"),
        ("comparing", "stops", None, "replica 0 does not answer"),
        ("comparing", "ends", None, "the connection to replica 0 broke off"),
        ("comparing", "ends", SECRET, "the connection to replica 0 broke off"),
        ("connecting", "stops", None, "replica 0 does not answer|could not be connected"),
        ("connecting", "ends", None, "replica 0 broke off|could not be connected"),
    ],
)
def test_a_start_ends_with_a_sentence(moment, how, secret, sentence, tmp_path):
    arguments = (moment, how, secret, str(tmp_path))
    _, (message, missing, seconds) = run_replicas(start_in_vain, 2, *arguments, joined=False, mortal=(0,))
    assert re.search(sentence, message), message
    assert missing == (0,) or "could not be connected" in message
    assert seconds < TIMEOUT_SECONDS + 10


def exchange_in_vain(folder: str) -> tuple[str, list[float]]:
    """The error of a wait for replica 0, and how long the wait, the notice of it, and that of a finish took."""
    notices._SECONDS_TO_BE_READ = 0.5
    exchange = diloco.connect(timeout_seconds=20)
    payloads = {1 - exchange.replica: torch.ones(9, dtype=torch.uint8)}
    exchange.start(payloads, Tag(Channel.PAYLOAD, 0, 1)).wait()
    exchange._timeout_seconds = TIMEOUT_SECONDS
    if exchange.replica == 0:
        end("stops", folder)
    pid = pid_of_the_first(folder)
    times = [time.monotonic()]
    with pytest.raises(diloco.ExchangeError) as caught:
        exchange.start(payloads, Tag(Channel.PAYLOAD, 0, 2, step=9)).wait()
    times.append(time.monotonic())
    exchange.abort("no payload")
    times.append(time.monotonic())
    with exchange.finishing(9):
        times.append(time.monotonic())
    exchange.close()
    times.append(time.monotonic())
    os.kill(pid, signal.SIGKILL)
    return str(caught.value), [after - before for before, after in pairwise(times)]


def test_an_exchange_with_a_replica_that_stands_still_ends(tmp_path):
    _, (message, durations) = run_replicas(exchange_in_vain, 2, str(tmp_path), joined=False, mortal=(0,))
    assert message.startswith("fragment 0, round 2: no payload from or to replica 0")
    assert all(seconds < TIMEOUT_SECONDS + 10 for seconds in durations), durations
