"""Network namespaces, one a replica, joined by links of a given bandwidth; needs root, and removes them again.

    with Laboratory(2) as laboratory:
        laboratory.set_links(gbit_s=0.1)
        process = laboratory.start(0, ["python", "train.py"])

Each namespace has an interface with the address 10.77.0.{replica + 1}. Without an emulator it is one end of a veth
pair whose other end hangs on a bridge, and `tc tbf` limits what leaves either end: a replica sends and receives
at the bandwidth of its link. These links have no latency and lose nothing. With an emulator, a C program that
joins TUN interfaces (usage: RATE_MBIT DELAY_MS LOSS MTU QUEUE_KB NAMESPACE…), latency and loss can be chosen.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

MTU = 1500
_QUEUE_SECONDS = 0.05


class Laboratory:
    """A context that ends its processes and removes its namespaces however it is left.

    Args:
        num_replicas: the number of namespaces.
        emulator: C source of a program that joins them, for latency and loss.
        congestion_control: the kernel's name of TCP's algorithm; cubic is the most common. None is this kernel's
            default. With BBR an exchange of some 0.5 MB now and then halts for 50 ms.

    Raises:
        PermissionError: without root.
    """

    def __init__(
        self, num_replicas: int, *, emulator: Path | None = None, congestion_control: str | None = "cubic"
    ) -> None:
        if os.geteuid() != 0:
            raise PermissionError("the network laboratory makes network namespaces: run it as root")
        self.num_replicas = num_replicas
        self._emulator, self._congestion_control = emulator, congestion_control
        self._binary: Path | None = None
        self._name = f"diloco-{os.getpid()}"
        self._running: list[subprocess.Popen[Any]] = []
        self._link: subprocess.Popen[Any] | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Laboratory":
        """Make the namespaces, and join them without a bandwidth limit."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if threading.current_thread() is threading.main_thread():
                self._cleanup.callback(signal.signal, number, signal.signal(number, _leave))
        try:
            for replica in range(self.num_replicas):
                self._add_namespace(self.namespace(replica))
                _ip("-n", self.namespace(replica), "link", "set", "lo", "up")
            if self._emulator is None:
                self._join_by_a_bridge()
            else:
                directory = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory()))
                self._binary = directory / "emulator"
                _run(["cc", "-O2", "-o", str(self._binary), str(self._emulator)])
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, and remove all namespaces."""
        try:
            self.stop()
        finally:
            self._cleanup.close()

    @property
    def interface(self) -> str:
        """The interface's name within a namespace, for GLOO_SOCKET_IFNAME."""
        return "slow0" if self._emulator is None else "wan0"

    def namespace(self, replica: int) -> str:
        """The name of a replica's namespace."""
        return f"{self._name}-{replica}"

    def address(self, replica: int) -> str:
        """A replica's IP address on the interface."""
        return f"10.77.0.{replica + 1}"

    def set_links(self, *, gbit_s: float, latency_seconds: float = 0.0, loss: float = 0.0) -> None:
        """Give all links a bandwidth, each way; with an emulator also a one-way latency and a loss.

        Raises:
            ValueError: for latency or loss without an emulator.
        """
        if self._binary is None:
            if latency_seconds or loss:
                raise ValueError("latency and loss need an emulator: this kernel's tc has no netem")
            for replica in range(self.num_replicas):
                self.set_link(replica, up_gbit_s=gbit_s, down_gbit_s=gbit_s)
            self._choose_congestion_control()
            return
        self._stop_emulator()
        queue_kb = max(256, 1e9 * gbit_s / 8 * (_QUEUE_SECONDS + 2 * latency_seconds) / 1024)
        numbers = [1000 * gbit_s, 1000 * latency_seconds, loss, MTU, queue_kb]
        spaces = [self.namespace(replica) for replica in range(self.num_replicas)]
        self._link = subprocess.Popen([str(self._binary), *(f"{number:g}" for number in numbers), *spaces])
        deadline = time.monotonic() + 10
        while not self._emulator_is_up():
            if time.monotonic() > deadline or self._link.poll() is not None:
                raise RuntimeError(f"{self._emulator} did not bring its interfaces up")
            time.sleep(0.05)
        self._choose_congestion_control()

    def set_link(self, replica: int, *, up_gbit_s: float, down_gbit_s: float) -> None:
        """Give one replica's link, without an emulator, a bandwidth for each way."""
        assert self._binary is None, "an emulator's links are all alike"
        _limit(self.namespace(replica), self.interface, up_gbit_s)
        _limit(self._hub, f"port{replica}", down_gbit_s)

    def _choose_congestion_control(self) -> None:
        for replica in range(self.num_replicas if self._congestion_control is not None else 0):
            route = f"route change 10.77.0.0/24 dev {self.interface} scope link src {self.address(replica)}"
            _ip("-n", self.namespace(replica), *route.split(), "congctl", str(self._congestion_control))

    def start(
        self,
        replica: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Run a command in a replica's namespace, where the host's name is the replica's address."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.address(replica)]
        whole = ["ip", "netns", "exec", self.namespace(replica), *named, *command]
        process = subprocess.Popen(
            whole,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
            preexec_fn=_end_with_the_parent,
            **options,
        )
        self._running.append(process)
        return process

    def bytes_sent(self, replica: int) -> int:
        """Bytes that left the replica's interface since the links were set, headers included.

        A veth interface counts the headers of a 64 kB packet once, before it is cut to the MTU; tbf counts them
        as often as a wire would carry them.
        """
        inside = ["ip", "netns", "exec", self.namespace(replica)]
        if self._binary is not None:
            return int(_run([*inside, "cat", f"/sys/class/net/{self.interface}/statistics/tx_bytes"]))
        return json.loads(_run([*inside, "tc", "-s", "-j", "qdisc", "show", "dev", self.interface]))[0]["bytes"]

    def stop(self) -> None:
        """End every process that was started."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        self._running.clear()
        self._stop_emulator()

    @property
    def _hub(self) -> str:
        return f"{self._name}-hub"

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._cleanup.callback(_ip, "netns", "del", name)

    def _join_by_a_bridge(self) -> None:
        self._add_namespace(self._hub)
        _ip("-n", self._hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "dev", "bridge0", "up")
        for replica in range(self.num_replicas):
            space, port = self.namespace(replica), f"port{replica}"
            near, far = ["name", port, "netns", self._hub], ["name", self.interface, "netns", space]
            _ip("link", "add", *near, "mtu", str(MTU), "type", "veth", "peer", *far, "mtu", str(MTU))
            _ip("-n", self._hub, "link", "set", "dev", port, "master", "bridge0", "up")
            _ip("-n", space, "link", "set", "dev", self.interface, "up")
            _ip("-n", space, "addr", "add", f"{self.address(replica)}/24", "dev", self.interface)

    def _stop_emulator(self) -> None:
        if self._link is not None:
            self._link.terminate()
            self._link.wait(timeout=10)
            self._link = None

    def _emulator_is_up(self) -> bool:
        states = [
            _run(["ip", "-n", self.namespace(replica), "-brief", "link"], check=False)
            for replica in range(self.num_replicas)
        ]
        return all(self.interface in state and "LOWER_UP" in state for state in states)


def _leave(number: int, frame: object) -> None:
    """Leave by the context's end at a signal that would otherwise end this process at once."""
    raise SystemExit(128 + number)


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit(space: str, interface: str, gbit_s: float) -> None:
    rate = round(1e9 * gbit_s)
    burst = max(16 * MTU, rate // 8 // 250)  # what may leave in a tick of the kernel's clock
    command = f"tc qdisc replace dev {interface} root tbf rate {rate}bit burst {burst} latency {_QUEUE_SECONDS}s"
    _run(["ip", "netns", "exec", space, *command.split()])


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str], *, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
