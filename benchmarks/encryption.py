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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from network.laboratory import Laboratory

import diloco
from diloco.exchange.process_group import GroupExchange
from diloco.exchange.transport import Channel, Tag, barrier

Start = Callable[[int, list[str], dict[str, str]], "subprocess.Popen[str]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit-s", type=float, default=1.0, help="of each replica's link; 0 is loopback")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of a payload")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.address is not None:
        print(json.dumps(exchange_payloads(arguments)))
        return
    print(f"{arguments.megabytes:g} MB each way, {arguments.connections} connections")
    print("           seconds  Gbit/s each way  of the link  processor s a GB")
    encrypted = {"DILOCO_SECRET": "a secret of many letters"}
    ways: list[tuple[str, dict[str, str], bool]] = [("gloo", {}, False), ("encrypted", encrypted, False)]
    if arguments.gbit_s and shutil.which("wireguard-go") and shutil.which("wg"):
        ways.append(("WireGuard", {}, True))
    for name, environment, vpn in ways:
        seconds, processor_seconds = measure(arguments, environment, vpn=vpn)
        gbit_s = 8e-3 * arguments.megabytes / seconds
        share_of_link = f"{gbit_s / arguments.gbit_s:11.1%}" if arguments.gbit_s else f"{'':11}"
        print(f"{name:9}  {seconds:7.3f}  {gbit_s:15.2f}  {share_of_link}  {processor_seconds:16.2f}", flush=True)


def measure(arguments: argparse.Namespace, environment: dict[str, str], *, vpn: bool) -> tuple[float, float]:
    """Seconds of a round, and processor seconds of a replica for each GB that it sends."""
    if not arguments.gbit_s:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return _run(arguments, f"127.0.0.1:{port}", environment, _start_here)
    with Laboratory(2) as laboratory:
        laboratory.set_links(gbit_s=arguments.gbit_s)

        def start(replica: int, command: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
            return laboratory.start(replica, command, environment=environment, stdout=subprocess.PIPE, text=True)

        if not vpn:
            return _run(arguments, f"{laboratory.address(0)}:29500", environment, start)
        with wireguard(laboratory) as processes:
            seconds, processor_seconds = _run(arguments, f"{_inside(0)}:29500", environment, start)
            of_vpn = statistics.mean(map(_processor_seconds, processes))
        return seconds, processor_seconds + of_vpn / (1e-3 * arguments.megabytes * (arguments.rounds + 1))


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


def _start_here(replica: int, command: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def _run(
    arguments: argparse.Namespace, address: str, environment: dict[str, str], start: Start
) -> tuple[float, float]:
    sizes = [
        "--megabytes",
        arguments.megabytes,
        "--rounds",
        arguments.rounds,
        "--connections",
        arguments.connections,
    ]
    replicas = []
    for replica in range(2):
        command = [sys.executable, str(Path(__file__)), *map(str, sizes), "--address", address]
        replicas.append(start(replica, [*command, "--replica", str(replica)], environment))
    answers = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in replicas]
    seconds, processor_seconds = (statistics.mean(column) for column in zip(*answers, strict=True))
    return seconds, processor_seconds


def exchange_payloads(arguments: argparse.Namespace) -> tuple[float, float]:
    """Exchange as one of the two replicas."""
    torch.set_num_threads(1)
    exchange = diloco.connect(
        *(arguments.address,),
        replica=arguments.replica,
        num_replicas=2,
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
