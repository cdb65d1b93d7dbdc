"""The network laboratory: real namespaces, which need root."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.network.laboratory import MTU, Laboratory


def _namespaces(pid: int = os.getpid()) -> set[str]:
    """The namespaces of a process's laboratories."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split() if name.startswith(f"diloco-{pid}-")}


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    try:
        with Laboratory(1):
            return True
    except (PermissionError, RuntimeError):
        return False


pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, and iproute2's ip and tc")

NUM_BYTES = 4_000_000
RECEIVE = """
import socket
with socket.create_server(("10.77.0.1", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    received = 0
    while chunk := connection.recv(1 << 16):
        received += len(chunk)
    print(received, socket.gethostname())
"""
SEND = f"import socket; socket.create_connection(('10.77.0.1', 5000)).sendall(bytes({NUM_BYTES}))"


def test_bytes_arrive_and_are_counted_with_their_headers():
    before = _namespaces()
    with Laboratory(2) as laboratory:
        assert len(_namespaces() - before) == 3, "two replicas and what joins them"
        laboratory.set_links(gbit_s=0.1)
        receiver = laboratory.start(0, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "listening\n"
        start = time.monotonic()
        assert laboratory.start(1, [sys.executable, "-c", SEND]).wait(timeout=30) == 0
        assert receiver.communicate(timeout=30)[0] == f"{NUM_BYTES} 10.77.0.1\n"
        assert time.monotonic() - start > 0.9 * 8 * NUM_BYTES / 1e8  # it may take longer on a busy machine
        # Each packet of an MTU carries 52 bytes of IP and TCP headers, and 14 of Ethernet's.
        packets = NUM_BYTES / (MTU - 52)
        assert NUM_BYTES + 60 * packets < laboratory.bytes_sent(1) < NUM_BYTES + 80 * packets
        assert 0 < laboratory.bytes_sent(0) < 0.05 * NUM_BYTES
    assert _namespaces() == before


def test_an_error_in_the_context_leaves_nothing_behind():
    before = _namespaces()
    started = []
    with pytest.raises(ZeroDivisionError), Laboratory(2) as laboratory:
        started.append(laboratory.start(0, ["sleep", "1000"]))
        raise ZeroDivisionError
    assert started[0].poll() is not None
    assert _namespaces() == before


TERMINATED = """
import sys, time
from benchmarks.network.laboratory import Laboratory
with Laboratory(1) as laboratory:
    print(laboratory.start(0, ["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ
    )
    child = int(process.stdout.readline())
    assert _namespaces(process.pid)
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    process.stdout.close()
    assert not _namespaces(process.pid)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_latency_without_an_emulator_is_refused():
    with Laboratory(1) as laboratory, pytest.raises(ValueError, match="need an emulator"):
        laboratory.set_links(gbit_s=1.0, latency_seconds=0.1)
