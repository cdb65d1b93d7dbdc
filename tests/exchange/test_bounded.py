"""Waits for a replica 0 that stands still (SIGSTOP), or has ended, are over in time."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from tests.processes import run_replicas, wait_for_files

import diloco
from diloco.exchange import connect as connecting
from diloco.exchange import meeting, notices, process_group, transport
from diloco.exchange.notices import within
from diloco.exchange.transport import Channel, Tag

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


def test_a_wait_for_processes_that_come_together_looks_again_at_once(monkeypatch):
    sleeps: list[float] = []
    monkeypatch.setattr(transport.time, "monotonic", lambda: sum(sleeps))
    monkeypatch.setattr(transport.time, "sleep", sleeps.append)
    transport.wait_for_all(lambda: "" if len(sleeps) == 100 else "replica 1", begin=0.0, seconds=60, remedy="")
    assert sleeps[0] == 0.001 and sum(sleeps[:10]) < 0.05, "as soon as they are there"
    assert sleeps == sorted(sleeps) and sleeps[-1] == 0.05, "no store is asked more often later"


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


def start_in_vain(moment: str, how: str, secret: str | None, folder: str) -> tuple[str, tuple[int, ...]]:
    """The error of replica 1, while replica 0 goes no further than to some moment of the start."""
    is_first, ask, in_the_clear = os.environ["DILOCO_REPLICA"] == "0", meeting.ask, connecting._InTheClear

    def ask_until_the_end(deadline: float, call: object, *arguments: object) -> object:
        if is_first:
            Path(folder, "has come").touch()
        elif moment == "comparing" and arguments == (["arrivals/2/0"],):
            pid_of_the_first(folder)
        answer = ask(deadline, call, *arguments)
        if is_first and moment == "comparing" and arguments == (["arrivals/1/0"],) and answer:
            end(how, folder)
        return answer

    def open_and_end(*arguments: object) -> object:
        way = in_the_clear(*arguments)
        if moment == "listening":
            end(how, folder)
        return way

    meeting.ask = ask_until_the_end
    if how == "stops":
        meeting.SECONDS_FOR_THE_LAST_ANSWER = connecting.SECONDS_FOR_THE_LAST_ANSWER = 0.2
        connecting._SECONDS_FOR_GLOOS_ERROR = 0.2
    if is_first:
        connecting._InTheClear, connecting._exchange = open_and_end, lambda *_: end(how, folder)
    else:
        wait_for_files(Path(folder, "pid" if moment == "listening" else "has come"))
    with pytest.raises(diloco.ExchangeError) as caught:
        diloco.connect(
            num_replicas=2 if moment == "connecting" else 3,
            timeout_seconds=20 if is_first or how == "ends" else 0.3 if moment == "listening" else 1.0,
            secret=secret,
        )
    if how == "stops":
        os.kill(pid_of_the_first(folder), signal.SIGKILL)
    return str(caught.value), caught.value.missing


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
    _, (message, missing) = run_replicas(start_in_vain, 2, *arguments, joined=False, mortal=(0,))
    assert re.search(sentence, message), message
    assert missing == (0,) or "could not be connected" in message


def exchange_in_vain(folder: str) -> str:
    """The error of a wait for replica 0; the wait, its notice, a finish and the close all end."""
    notices._SECONDS_TO_BE_READ, process_group._SECONDS_FOR_THE_CAUSE = 0.2, 0.1
    exchange = diloco.connect(timeout_seconds=20)
    payloads = {1 - exchange.replica: torch.ones(9, dtype=torch.uint8)}
    exchange.start(payloads, Tag(Channel.PAYLOAD, 0, 1)).wait()
    exchange._timeout_seconds = 0.3
    if exchange.replica == 0:
        end("stops", folder)
    pid = pid_of_the_first(folder)
    with pytest.raises(diloco.ExchangeError) as caught:
        exchange.start(payloads, Tag(Channel.PAYLOAD, 0, 2, step=9)).wait()
    exchange.abort("no payload")
    with exchange.finishing(9):
        pass
    exchange.close()
    os.kill(pid, signal.SIGKILL)
    return str(caught.value)


def test_an_exchange_with_a_replica_that_stands_still_ends(tmp_path):
    _, message = run_replicas(exchange_in_vain, 2, str(tmp_path), joined=False, mortal=(0,))
    assert message.startswith("fragment 0, round 2: no payload from or to replica 0")
