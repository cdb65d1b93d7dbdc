"""Frames, requests and messages about the run, mutated: bounded, and refused by our own errors alone."""

import json
import socket
import ssl
import struct
import threading
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import memory

from diloco.errors import DisagreementError, ExchangeError
from diloco.exchange import meeting
from diloco.exchange.encrypted.link import Link
from diloco.exchange.encrypted.session import Board, OwnBoard, RemoteBoard, Request, _address, _receive
from diloco.exchange.encrypted.tls import Security
from diloco.exchange.notices import Notices
from diloco.exchange.transport import Channel, Tag, agree, share

HOSTILE = settings(settings.get_profile("hostile"))


def connected(security: Security) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    ends: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: ends.append(security.server.wrap_socket(far, server_side=True)))
    thread.start()
    client = security.client.wrap_socket(near)
    thread.join()
    return client, ends[0]


FRAMES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 2, 2, 3, 255]),
        st.sampled_from([5, 5, 5, 6, 2**32 - 1]),
        st.sampled_from([0, 0, 0, 1, 50, 100, 2**63]),
        st.sampled_from([0, 1, 50, 99, 100, 100, 101, 2**20, 2**62]),
    ),
    min_size=1,
    max_size=6,
)


@HOSTILE
@given(frames=FRAMES, body=st.binary(max_size=300))
def test_a_link_takes_only_what_it_asked_for(security, frames, body):
    (ours, theirs), (ours_back, theirs_back) = connected(security), connected(security)
    link = Link(ours, ours_back)
    buffer = torch.full((100,), 7, dtype=torch.uint8)
    operation = link.receive(buffer, 5)
    text = b"".join(struct.pack("<BIQQ", *frame) + body[: frame[3]] for frame in frames)
    with suppress(OSError):
        theirs_back.sendall(text)
    theirs_back.close()
    with suppress(RuntimeError):
        operation.wait(timedelta(seconds=5))
    assert operation.over.is_set()
    assert operation.error is not None or operation.position == 100
    assert link._num_requests <= 6
    link.fail("the end")
    theirs.close()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((2, 6, 0, 10), "it sent a message that nobody asked for"),
        ((2, 5, 1, 10), "it sent 10 bytes at 1 of a message of 2097152"),
        ((2, 5, 0, (1 << 20) + 1), "it sent 1048577 bytes at 0 of a message of 2097152"),
        ((2, 5, 0, 1 << 62), "it sent 4611686018427387904 bytes at 0 of a message of 2097152"),
        ((2, 5, 0, 0), "it sent a part without bytes"),
        ((3, 5, 0, 10), "it sent what is no frame"),
    ],
)
def test_a_frame_that_no_replica_sends_ends_the_link_with_the_reason(security, frame, reason):
    (ours, theirs), (ours_back, theirs_back) = connected(security), connected(security)
    operation = Link(ours, ours_back).receive(torch.zeros(1 << 21, dtype=torch.uint8), 5)
    with theirs, theirs_back:
        theirs_back.sendall(struct.pack("<BIQQ", *frame) + bytes(100))
        with pytest.raises(RuntimeError, match=f"^{reason}: the link is closed"):
            operation.wait(timedelta(seconds=5))


def test_a_peer_that_asks_for_everything_is_cut_off(security):
    (ours, theirs), (ours_back, theirs_back) = connected(security), connected(security)
    link = Link(ours, ours_back)
    with theirs, theirs_back, suppress(OSError):
        theirs_back.sendall(b"".join(struct.pack("<BIQQ", 1, tag, 0, 1 << 60) for tag in range(1 << 15)))
    with pytest.raises(RuntimeError, match="it asks for too many messages at once"):
        link.receive(torch.zeros(1, dtype=torch.uint8), 1).wait(timedelta(seconds=5))


def test_two_ends_that_differ_in_the_length_say_so(security):
    (a, b), (a_back, b_back) = connected(security), connected(security)
    one, other = Link(a, a_back), Link(b_back, b)
    receive = other.receive(torch.zeros(10, dtype=torch.uint8), 3)
    with pytest.raises(RuntimeError, match="it expects 10 bytes where 11 are sent"):
        one.send(torch.zeros(11, dtype=torch.uint8), 3).wait(timedelta(seconds=5))
    with pytest.raises(RuntimeError, match="closed the connection"):
        receive.wait(timedelta(seconds=5))


@HOSTILE
@given(
    st.binary(max_size=200)
    | st.builds(msgspec.msgpack.encode, st.lists(st.text() | st.integers(-(1 << 63), 1 << 63) | st.binary()))
)
def test_the_board_takes_only_requests(text):
    board = OwnBoard()
    board.ask(Request("compare_set", "words", b"not a number"))
    with suppress(ValueError):
        board.ask(msgspec.msgpack.decode(text, type=Request))
    assert board._num_bytes == sum(map(len, board._values.values()))


def test_the_board_is_bounded():
    board = OwnBoard()
    with pytest.raises(ValueError, match="the board is full"):
        for i in range(1000):
            board.ask(Request("compare_set", str(i), bytes(1 << 20)))
    assert board._num_bytes <= 1 << 26
    many = OwnBoard()
    with pytest.raises(ValueError, match="the board is full"):
        for i in range((1 << 16) + 1):
            many.ask(Request("compare_set", str(i)))
    assert len(many._values) == 1 << 16


def test_requests_and_keys_beyond_their_length_are_refused():
    with pytest.raises(ValueError, match="length <= 256"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["get", "k" * 257]), type=Request)
    near, far = socket.socketpair()
    with near, far, pytest.raises(ValueError, match="a message of 4294967295 bytes is longer than 1048576"):
        near.sendall(b"\xff" * 4)
        near.shutdown(socket.SHUT_WR)
        _receive(far, 1 << 20)


class Told:
    """A transport on which replica 1 answers with fixed texts, cut or filled to the length that is expected."""

    replica, num_replicas, ordered, device, failure = 0, 2, False, torch.device("cpu"), None

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)

    def start(self, payloads, tag: Tag) -> "Told":
        self.length = payloads[1].numel()
        return self

    def wait(self) -> dict[int, torch.Tensor]:
        answer = bytearray(self.answers.pop(0)[: self.length].ljust(self.length))
        return {1: torch.frombuffer(answer, dtype=torch.uint8)}


DEEP = b"[" * 100_000
HOSTILE_TEXTS = [
    DEEP,
    b'{"a":' * 50_000,
    b"\xff\xfe",
    b"1" * 5000,
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"wire": {}}',
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_hostile_facts_end_in_our_own_errors(text):
    with pytest.raises((ExchangeError, DisagreementError)):
        agree(Told(bytes(32), len(text).to_bytes(8, "little"), text), {"wire": "e3m0"})


@HOSTILE
@given(
    st.binary(min_size=1, max_size=100)
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=6,
        ),
    )
)
def test_shared_values_have_their_type(text):
    with suppress(ExchangeError):
        _, theirs = share(Told(len(text).to_bytes(8, "little"), text), [1, 2], list[int])
        assert all(type(number) is int for number in theirs)


def test_a_huge_announcement_takes_no_memory():
    sentence = "replica 1 announces a message of 1152921504606846976 bytes"
    with memory.at_most(1 << 20), pytest.raises(ExchangeError, match=sentence):
        share(Told((1 << 60).to_bytes(8, "little")), [1])


@pytest.mark.parametrize("text", [*HOSTILE_TEXTS, b"", b"1.5"], ids=range(11))
def test_hostile_notices_end_the_wait(text):
    store = dist.HashStore()
    notices = Notices(store, 0, 2, 2)
    store.set("finishing/1", text)
    reasons: list[str] = []
    wait = SimpleNamespace(tag=Tag(Channel.PAYLOAD, 0, 1, step=5), interrupt=reasons.append)
    with notices.watching(wait):
        notices.look()
    assert "replica 1 posted a notice that this version can't read" in reasons[0]


ARRIVAL = {"num_replicas": 2, "leader": False, "num_connections": 1, "processes_per_replica": 1}
ARRIVAL |= {"job": None, "process": "f00d/1", "number": 1}


def test_an_arrival_is_read():
    assert meeting._arrival(json.dumps(ARRIVAL).encode(), 1).processes_per_replica == 1


def test_a_hostile_failure_is_short_and_obeys_no_terminal():
    store = dist.HashStore()
    notices = Notices(store, 0, 2, 2)
    store.set("failure", b"\x1b[2J\xff" + b"x" * 1_000_000)
    notices.look()
    assert notices.failure is not None and len(notices.failure) < 5000 and "\x1b" not in notices.failure


@pytest.mark.parametrize(
    "text",
    HOSTILE_TEXTS
    + [
        json.dumps(ARRIVAL | changed).encode()
        for changed in (
            *({"processes_per_replica": size} for size in (-1, 0, 1 << 20, 1e9, None)),
            *({"leader": []}, {"job": 3}, {"more": 1}),
        )
    ],
)
def test_hostile_arrivals_are_refused(text):
    with pytest.raises(ExchangeError, match="replica 1 came with facts that this version does not know"):
        meeting._arrival(text, 1)


@pytest.mark.parametrize("text", ["", "nowhere", "host:port", "host:²", f"{'x' * 400}:1", "host:-1"])
def test_addresses_that_are_none_are_not_dialled(text):
    board = OwnBoard()
    board.compare_set("process 0/0", "", text)
    with pytest.raises(ValueError, match="is no address"):
        _address(board, "process 0/0", 0.0)


def test_an_answer_of_another_type_is_an_error_of_replica_0():
    class Liar(Board):
        def ask(self, request: Request) -> int:
            return 3

    with pytest.raises(ExchangeError, match="replica 0 answers get with int"):
        Liar().get("key")


def test_a_board_whose_answer_does_not_come_is_closed_at_once():
    ours, theirs = socket.socketpair()
    board, errors = RemoteBoard(ours, seconds=600.0), []

    def ask() -> None:
        with pytest.raises(ExchangeError) as caught:
            board.ask(Request("get", "a key"))
        errors.append(str(caught.value))

    thread = threading.Thread(target=ask)
    thread.start()
    theirs.recv(1)  # the request is on its way
    board.close()
    thread.join(60)
    assert errors[0].startswith("the connection to replica 0 broke off")
    theirs.close()
