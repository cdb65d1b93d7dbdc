"""The cost of a secret: payloads in the clear (gloo) beside encrypted ones (TLS 1.3), and the processor time.

    sudo python benchmarks/encryption.py              # two network namespaces, joined at 1 Gbit/s
    python benchmarks/encryption.py --gbit-s 0        # loopback, without a limit; needs no root

On a link a VPN is measured, too, where wireguard-go and wg are installed (Debian has both): gloo over WireGuard in
user space, whose processor time counts.

Two replicas send each other payloads at once, one after the other. Seconds are the median of all rounds; processor
seconds are those of one process, which sends and receives, for each GB that it sends.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from network.laboratory import Laboratory

import diloco
from diloco.exchange.process_group import GroupExchange
from diloco.exchange.transport import Channel, Tag, barrier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit-s", type=float, default=1.0, help="of each replica's link; 0 is loopback")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of a payload")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica is not None:
        torch.set_num_threads(1)
        for line in sys.stdin:
            print(json.dumps(exchange_payloads(arguments, **json.loads(line))), flush=True)
        return
    print(f"{arguments.megabytes:g} MB each way, {arguments.connections} connections")
    print("           seconds  Gbit/s each way  of the link  processor s a GB")
    with ExitStack() as stack:
        laboratory = stack.enter_context(Laboratory(2)) if arguments.gbit_s else None
        if laboratory is not None:
            laboratory.set_links(gbit_s=arguments.gbit_s)
        replicas = [stack.enter_context(_replica(arguments, replica, laboratory)) for replica in range(2)]
        for name, secret in (("gloo", None), ("encrypted", "a secret of many letters")):
            address = "127.0.0.1" if laboratory is None else laboratory.address(0)
            _print(arguments, name, *_measure(replicas, address, secret))
        if laboratory is not None and shutil.which("wireguard-go") and shutil.which("wg"):
            with wireguard(laboratory) as processes:
                before = statistics.mean(map(_processor_seconds, processes))
                seconds, processor_seconds = _measure(replicas, _inside(0), None)
                of_vpn = statistics.mean(map(_processor_seconds, processes)) - before
            of_vpn /= 1e-3 * arguments.megabytes * (arguments.rounds + 1)
            _print(arguments, "WireGuard", seconds, processor_seconds + of_vpn)


def _print(arguments: argparse.Namespace, name: str, seconds: float, processor_seconds: float) -> None:
    gbit_s = 8e-3 * arguments.megabytes / seconds
    share_of_link = f"{gbit_s / arguments.gbit_s:11.1%}" if arguments.gbit_s else f"{'':11}"
    print(f"{name:9}  {seconds:7.3f}  {gbit_s:15.2f}  {share_of_link}  {processor_seconds:16.2f}", flush=True)


@contextmanager
def _replica(
    arguments: argparse.Namespace, replica: int, laboratory: Laboratory | None
) -> "Iterator[subprocess.Popen[str]]":
    """The process of a replica, which exchanges payloads in each way that it is asked for."""
    names = ("megabytes", "rounds", "connections")
    flags = [word for name in names for word in (f"--{name}", str(getattr(arguments, name)))]
    command = [sys.executable, str(Path(__file__)), *flags, "--replica", str(replica)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    if laboratory is not None:
        yield laboratory.start(replica, command, **pipes)
        return
    with subprocess.Popen(command, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _measure(replicas: "Sequence[subprocess.Popen[str]]", host: str, secret: str | None) -> tuple[float, float]:
    """Seconds of a round, and processor seconds of a replica for each GB that it sends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"{host}:{probe.getsockname()[1]}"
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.write(json.dumps({"address": address, "secret": secret}) + "\n")
        replica.stdin.flush()
    answers = [json.loads(replica.stdout.readline()) for replica in replicas if replica.stdout is not None]
    seconds, processor_seconds = (statistics.mean(column) for column in zip(*answers, strict=True))
    return seconds, processor_seconds


@contextmanager
def wireguard(laboratory: Laboratory) -> Iterator[list[int]]:
    """Join the two namespaces by WireGuard; yields its processes."""
    secrets = [_output(["wg", "genkey"]) for _ in range(2)]
    public = [_output(["wg", "pubkey"], secret) for secret in secrets]
    # The names differ, since the sockets by which wg controls them lie in one directory.
    names = [f"diloco-wg{replica}" for replica in range(2)]
    processes = [
        laboratory.start(r, ["wireguard-go", "-f", name], stderr=subprocess.DEVNULL)
        for r, name in enumerate(names)
    ]
    for replica, name in enumerate(names):
        inside = ["ip", "netns", "exec", laboratory.namespace(replica)]
        deadline = time.monotonic() + 10
        while not Path(f"/var/run/wireguard/{name}.sock").exists():
            assert time.monotonic() < deadline and processes[replica].poll() is None, "wireguard-go did not start"
            time.sleep(0.05)
        other = 1 - replica
        peer = ["peer", public[other], "allowed-ips", f"{_inside(other)}/32"]
        endpoint = ["endpoint", f"{laboratory.address(other)}:51820"]
        own = ["wg", "set", name, "listen-port", "51820", "private-key", "/dev/stdin"]
        _output([*inside, *own, *peer, *endpoint], secrets[replica])
        _output([*inside, "ip", "address", "add", f"{_inside(replica)}/24", "dev", name])
        _output([*inside, "ip", "link", "set", name, "mtu", "1420", "up"])
    yield [process.pid for process in processes]


def _inside(replica: int) -> str:
    """A replica's address in the VPN."""
    return f"10.78.0.{replica + 1}"


def _processor_seconds(process: int) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _output(command: list[str], text: str = "") -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.strip()


def exchange_payloads(arguments: argparse.Namespace, address: str, secret: str | None) -> tuple[float, float]:
    """Exchange as one of the two replicas."""
    exchange = diloco.connect(
        address,
        replica=arguments.replica,
        num_replicas=2,
        secret=secret,
        timeout_seconds=120,
        num_connections=arguments.connections,
    )
    payload = {
        1 - arguments.replica: torch.randint(0, 256, (round(1e6 * arguments.megabytes),), dtype=torch.uint8)
    }
    exchange.start(payload, Tag(Channel.PROBE, round=1)).wait()  # the first one allocates
    seconds, processor_seconds = [], 0.0
    for number in range(2, arguments.rounds + 2):
        barrier(exchange)
        processor_start, start = time.process_time(), time.perf_counter()
        exchange.start(payload, Tag(Channel.PROBE, round=number)).wait()
        seconds.append(time.perf_counter() - start)
        processor_seconds += time.process_time() - processor_start
    barrier(exchange)
    assert isinstance(exchange, GroupExchange), "each replica is one process"
    exchange.close()
    return statistics.median(seconds), processor_seconds / (1e-3 * arguments.megabytes * arguments.rounds)


if __name__ == "__main__":
    main()
