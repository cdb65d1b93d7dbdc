"""Peers that lie: without the proof they get nothing, and with it they end an exchange by a sentence at most."""

import os
import random
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress
from itertools import cycle
from queue import SimpleQueue

import pytest
import torch
from tests.hostile.conftest import SECRET
from tests.ports import free_port
from tests.processes import run_replicas

import diloco
from diloco.errors import ExchangeError
from diloco.exchange.encrypted import tls
from diloco.exchange.encrypted.tls import _MOST_HANDSHAKES, Door, dial, security_of
from diloco.exchange.transport import Channel, Tag, Transport


def exchange_under_attack(port: int, num_rounds: int) -> list[int]:
    """Sums of what came in each round."""
    exchange = diloco.connect(f"127.0.0.1:{port}", secret=SECRET, timeout_seconds=40)
    other, sums = 1 - exchange.replica, []
    for number in range(1, num_rounds + 1):
        payload = torch.full((100_003,), (exchange.replica + number) % 256, dtype=torch.uint8)
        received = exchange.start({other: payload}, Tag(Channel.PAYLOAD, 0, number)).wait()
        sums.append(int(received[other].long().sum()))
        time.sleep(0.02)
    exchange.close()
    return sums


def random_bytes(port: int, rng: random.Random) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(rng.randbytes(rng.randrange(1, 5000)))
        assert not connection.recv(1000).startswith(b"\x01")


def tls_without_certificate(port: int, rng: random.Random) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    talk(context, port)


def tls_with_another_secret(port: int, rng: random.Random) -> None:
    other = security_of("another secret of some length", None)
    other.client.verify_mode = ssl.CERT_NONE
    talk(other.client, port)


def talk(context: ssl.SSLContext, port: int) -> None:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=1) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(b"\x05board")
        assert connection.recv(1) == b"", "a byte of the run"


def store_in_the_clear(port: int, rng: random.Random) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x08\x00\x00\x00\x00\x00\x00\x00diloco/x")
        assert b"diloco" not in connection.recv(1000)


def half_a_hello(port: int, rng: random.Random) -> None:
    connection = socket.create_connection(("127.0.0.1", port), timeout=1)
    connection.sendall(b"\x16\x03\x01")
    HELD.append(connection)


def silence(port: int, rng: random.Random) -> None:
    HELD.extend(socket.create_connection(("127.0.0.1", port), timeout=1) for _ in range(_MOST_HANDSHAKES))


def with_the_secret(port: int, rng: random.Random) -> None:
    security = security_of(SECRET, None)
    for purpose in ("process 9, connection 0/1/sends", "nothing of the kind"):
        with security.client.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=1)) as connection:
            connection.sendall(bytes([len(purpose)]) + purpose.encode())
            assert connection.recv(1) == b"", "nobody expects it"
    board = dial(f"127.0.0.1:{port}", "board", security)
    board.sendall(rng.choice([b"\xff\xff\xff\xff", b"\x04\x00\x00\x00rubb", rng.randbytes(400)]))
    with suppress(OSError):
        board.recv(1)
    board.close()


ROGUES = (
    *(random_bytes, tls_without_certificate, tls_with_another_secret, store_in_the_clear),
    *(half_a_hello, silence, with_the_secret),
)
HELD: list[socket.socket] = []
KEPT: list[Transport] = []
"""Exchanges that stay until their process ends."""


def release(num_left: int) -> None:
    while len(HELD) > num_left:
        HELD.pop(0).close()


def attack(port: int, ended: threading.Event, wrong: list[BaseException]) -> None:
    rng = random.Random(0)
    for rogue in cycle(ROGUES):
        if ended.is_set():
            return
        try:
            rogue(port, rng)
        except AssertionError as error:
            wrong.append(error)
        except OSError:
            pass  # refused, or the run is over
        release(4 * _MOST_HANDSHAKES)


@pytest.mark.slow
def test_rogues_get_nothing_and_the_run_goes_on():
    port, ended, wrong = free_port(), threading.Event(), []
    attacker = threading.Thread(target=attack, args=(port, ended, wrong))
    attacker.start()  # before the replicas meet, and as long as they train
    try:
        results = run_replicas(exchange_under_attack, 2, port, 40, joined=False)
    finally:
        ended.set()
        attacker.join()
        release(0)
    assert not wrong
    for replica, sums in enumerate(results):
        assert sums == [100_003 * (1 - replica + number) for number in range(1, 41)]


def be_hostile(frames: bytes) -> str:
    """Replica 1 has the secret, and then sends frames that mean nothing."""
    exchange = diloco.connect(secret=SECRET, timeout_seconds=20)
    other = 1 - exchange.replica
    payload = {other: torch.ones(100_000, dtype=torch.uint8)}
    exchange.start(payload, Tag(Channel.PAYLOAD, 0, 1)).wait()
    if exchange.replica == 1:
        exchange._backends[0]._links[0]._outgoing.sendall(frames)
        KEPT.append(exchange)
        return ""
    with pytest.raises(ExchangeError) as caught:
        exchange.start(payload, Tag(Channel.PAYLOAD, 0, 2)).wait()
    return str(caught.value)


def test_a_replica_that_sends_nonsense_is_named():
    huge = struct.pack("<BIQQ", 2, 1 << 30, 0, 1 << 60)
    message, _ = run_replicas(be_hostile, 2, huge, joined=False)
    assert message.startswith(
        "fragment 0, round 2: no payload from or to replica 1 (it sent a message that nobody"
    )


def come_twice(port: int) -> str:
    replica = min(int(os.environ["DILOCO_REPLICA"]), 1)
    try:
        exchange = diloco.connect(f"127.0.0.1:{port}", replica=replica, num_replicas=2, secret=SECRET)
    except diloco.UserError as error:
        return str(error)
    KEPT.append(exchange)
    return str(exchange.num_replicas)


def test_a_replica_number_that_is_taken_is_refused():
    first, *others = run_replicas(come_twice, 3, free_port(), joined=False)
    assert first == "2"
    assert sum("process 0 of replica 1 has come" in message for message in others) == 1


def test_a_flood_of_silent_connections_keeps_out_nobody(security, monkeypatch):
    monkeypatch.setattr(tls, "SECONDS_TO_SHAKE_HANDS", 600.0)  # only the flood's length can end its handshakes
    door = Door(socket.create_server(("127.0.0.1", 0), backlog=1024), security)
    flood = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(3 * _MOST_HANDSHAKES)]
    met = threading.Event()
    door.expect("purpose", lambda connection: met.set(), once=False)
    dial(f"127.0.0.1:{door.port}", "purpose", security).close()
    assert met.wait(60)
    assert len(door._in_handshake) <= _MOST_HANDSHAKES
    door.close()
    for connection in flood:
        connection.close()


def test_an_impostor_of_replica_0_is_not_told_what_a_replica_wants(security):
    impostor = security_of("another secret of some length", None)
    impostor.server.verify_mode = ssl.CERT_NONE
    door, purposes = Door(socket.create_server(("127.0.0.1", 0)), impostor), []
    door.expect("board", purposes.append, once=False)
    with pytest.raises(ExchangeError, match="has another secret"):
        dial(f"127.0.0.1:{door.port}", "board", security)
    door.close()
    assert not purposes


def test_no_older_tls_is_spoken(security):
    door = Door(socket.create_server(("127.0.0.1", 0)), security)
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", door.port)) as plain,
        pytest.raises(ssl.SSLError, match="PROTOCOL"),
    ):
        older.wrap_socket(plain)
    door.close()


def test_a_link_whose_place_is_taken_by_who_has_the_secret_is_an_error_of_the_late_one(security):
    """The second connection for a purpose that is expected once gets no byte."""
    door, arrived = Door(socket.create_server(("127.0.0.1", 0)), security), SimpleQueue()
    door.expect("process 0, connection 0/1/sends", arrived.put, once=True)
    first = dial(f"127.0.0.1:{door.port}", "process 0, connection 0/1/sends", security)
    handed_on = arrived.get(timeout=5)
    purpose = b"process 0, connection 0/1/sends"
    with security.client.wrap_socket(socket.create_connection(("127.0.0.1", door.port), timeout=5)) as late:
        late.sendall(bytes([len(purpose)]) + purpose)
        assert late.recv(1) == b"", "nobody expects a second one"
    for each in (first, handed_on):
        each.close()
    door.close()


def test_a_connection_that_says_nothing_is_closed_in_time(security, monkeypatch):
    monkeypatch.setattr(tls, "SECONDS_TO_SHAKE_HANDS", 0.2)
    door = Door(socket.create_server(("127.0.0.1", 0)), security)
    with socket.create_connection(("127.0.0.1", door.port), timeout=5) as silent:
        assert silent.recv(1) == b""
    door.close()


def test_no_more_processes_are_let_in_than_a_run_has(security, monkeypatch):
    monkeypatch.setattr(tls, "_MOST_INSIDE", 1)
    door, ended = Door(socket.create_server(("127.0.0.1", 0)), security), threading.Event()
    door.expect("board", lambda connection: ended.wait(5), once=False)
    with dial(f"127.0.0.1:{door.port}", "board", security):
        late = security.client.wrap_socket(socket.create_connection(("127.0.0.1", door.port), timeout=5))
        with late:
            late.sendall(b"\x05board")
            assert late.recv(1) == b""
        ended.set()
    door.close()
