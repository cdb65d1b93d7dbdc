"""The sockets on which processes listen, and the processes of a run; Linux only."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENS = "0A"


def listening(*pids: int) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Address and port of every TCP socket on which one of the processes listens."""
    sockets = set()
    for pid in pids:
        own = {f"socket:[{inode}]": where for inode, where in _listening_here(pid)}
        with suppress(FileNotFoundError, ProcessLookupError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    sockets.add(own.get(str(fd.readlink())))
    return sockets - {None}


def _listening_here(pid: int) -> Iterator[tuple[str, tuple[IPv4Address | IPv6Address, int]]]:
    """Inode, and address and port, of every socket that listens in the network namespace of a process."""
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS:
                    digits, port = local.split(":")
                    # The kernel writes words of 32 bits in the order of this machine's bytes.
                    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                    yield inode, (ip_address(socket.inet_ntop(family, b"".join(words))), int(port, 16))


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    pids = [pid]
    for parent in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids
