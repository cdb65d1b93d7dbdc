"""A network with faults, for tests and benchmarks: an HTTP proxy on loopback, in a process of its own.

It stands in front of a store that speaks plain HTTP. It passes everything on as it is, the Host header too, which
S3's signatures cover, unless a fault says otherwise. The faults can be changed at any time:

    with FaultProxy(port, seed=1) as proxy:
        proxy.set(latency_seconds=0.04, lose_requests=0.01, lose_answers=0.01)
        proxy.set(script=["lose_answer", "503"], methods=["PUT"])    # the next two PUTs; others pass
        proxy.set(outage=True)
"""

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_CHUNK = 1 << 18
_CODES = {
    403: "RequestTimeTooSkewed",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(kw_only=True)
class Faults:
    """The faults of the network; the defaults pass everything on."""

    latency_seconds: float = 0.0
    """Round trip that is added to each request, half of it before and half after it is carried out."""
    bytes_s: float = math.inf
    """Bandwidth each way, of all connections together."""
    lose_requests: float = 0.0
    """Probability that a request is not carried out: its connection closes."""
    lose_answers: float = 0.0
    """Probability that a request is carried out, and its connection closes before the answer."""
    truncate: float = 0.0
    """Probability that the connection closes amid the answer's body."""
    statuses: dict[str, float] = field(default_factory=dict)
    """Probability that a request is not carried out and is answered by a status: 403, 409, 412, 429, 500, 503."""
    script: list[str] = field(default_factory=list)
    """Faults of the next requests, one each: pass, lose_request, lose_answer, truncate, or a status."""
    methods: list[str] = field(default_factory=list)
    """The methods of requests that can be lost, truncated or refused; empty for all."""
    only: str = ""
    """Text that stands in the paths of those requests."""
    strip_condition: bool = False
    """Takes If-None-Match out of requests, so that every racer wins; it breaks signatures that cover it."""
    outage: bool = False
    """Closes all connections, and new ones at once."""
    freeze: bool = False
    """Passes nothing on, and closes nothing."""


class FaultProxy:
    """The proxy; a context that ends it. It ends with this process too, however that ends.

    Args:
        upstream_port: the store's port on loopback.
        seed: of the faults that are drawn.
    """

    def __init__(self, upstream_port: int, *, seed: int = 0) -> None:
        command = [sys.executable, "-I", __file__, str(upstream_port), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.faults = Faults()
        self.port: int = self._answer()["port"]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._process.wait()

    def set(self, **faults: Any) -> None:
        """Set these faults, and no others, from now on."""
        self.faults = Faults(**faults)
        self._ask(asdict(self.faults))

    def counts(self) -> Counter[str]:
        """Requests by method (GET …), by fault (lose_answer, 503 …), and bytes up and down."""
        return Counter(self._ask(None))

    def _ask(self, faults: dict[str, Any] | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(faults) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class _Proxy:
    def __init__(self, upstream_port: int, seed: int) -> None:
        self.faults = Faults()
        self.counts: Counter[str] = Counter()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._connections: set[asyncio.StreamWriter] = set()
        self._free_at = {"up": 0.0, "down": 0.0}

    def set(self, faults: Faults) -> None:
        self.faults = faults
        (self.thawed.clear if faults.freeze else self.thawed.set)()
        if faults.outage:
            for writer in self._connections:
                writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection's requests, until either side closes it or a fault does."""
        self._connections.add(writer)
        upstream = None
        try:
            if not self.faults.outage:
                upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port, limit=_CHUNK)
                while await self._exchange(reader, writer, *upstream):
                    pass
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort() if self.faults.outage else writer.close()
            if upstream is not None:
                upstream[1].close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        """Pass on one request and its answer; False if the connection ends with it."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path = head.split(b" ", 2)[:2]
        fault = self._fault(method.decode(), path.decode())
        self.counts[method.decode()] += 1
        self.counts[fault] += fault != "pass"
        if self.faults.strip_condition:
            lines = head.split(b"\r\n")
            head = b"\r\n".join(line for line in lines if not line.lower().startswith(b"if-none-match:"))
        await self._pause()
        if fault == "lose_request":
            return False
        if fault.isdigit():
            async for _ in self._body(head, reader, "up"):
                pass
            writer.write(_refusal(int(fault)))
            await writer.drain()
            return True
        up_writer.write(head)
        async for chunk in self._body(head, reader, "up"):
            up_writer.write(chunk)
            await up_writer.drain()
        answer = await up_reader.readuntil(b"\r\n\r\n")
        await self._pause()
        if fault == "lose_answer":
            return False
        writer.write(answer)
        has_body = method != b"HEAD" and answer.split(b" ", 2)[1] not in (b"204", b"304")
        if has_body:
            async for chunk in self._body(answer, up_reader, "down"):
                if fault == "truncate":
                    writer.write(chunk[: len(chunk) // 2])
                    await writer.drain()
                    return False
                writer.write(chunk)
                await writer.drain()
        return b"connection: close" not in answer.lower()

    def _fault(self, method: str, path: str) -> str:
        """The fault of a request."""
        faults = self.faults
        if (faults.methods and method not in faults.methods) or faults.only not in path:
            return "pass"
        if faults.script:
            return faults.script.pop(0)
        chances = {"lose_request": faults.lose_requests, "lose_answer": faults.lose_answers}
        drawn = self._random.random()
        for fault, chance in (chances | {"truncate": faults.truncate} | faults.statuses).items():
            drawn -= chance
            if drawn < 0:
                return fault
        return "pass"

    async def _pause(self) -> None:
        await self.thawed.wait()
        if self.faults.latency_seconds:
            await asyncio.sleep(self.faults.latency_seconds / 2)

    async def _body(self, head: bytes, reader: asyncio.StreamReader, way: str) -> AsyncIterator[bytes]:
        """The raw bytes of a body, chunks' sizes included, at the link's bandwidth."""
        headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            size = -1
            while size != 0:
                line = await reader.readuntil(b"\r\n")
                size = int(line.split(b";")[0], 16)
                yield line + await self._shaped(await reader.readexactly(size + 2), way)
            return
        left = int(headers.get(b"content-length", 0))
        while left > 0:
            chunk = await reader.read(min(left, _CHUNK))
            if not chunk:
                raise EOFError
            left -= len(chunk)
            yield await self._shaped(chunk, way)

    async def _shaped(self, chunk: bytes, way: str) -> bytes:
        """A chunk, once the link has room for it."""
        self.counts[f"bytes_{way}"] += len(chunk)
        await self.thawed.wait()
        if self.faults.bytes_s < math.inf:
            now = asyncio.get_running_loop().time()
            self._free_at[way] = max(self._free_at[way], now) + len(chunk) / self.faults.bytes_s
            await asyncio.sleep(self._free_at[way] - now)
        return chunk


def _refusal(status: int) -> bytes:
    code = _CODES[status]
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code></Error>'
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def _main(upstream_port: int, seed: int) -> None:
    proxy = _Proxy(upstream_port, seed)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=_CHUNK)
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)

    def answer(value: object) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    answer({"port": server.sockets[0].getsockname()[1]})
    while line := await commands.readline():
        faults = json.loads(line)
        if faults is not None:
            proxy.set(Faults(**faults))
        answer(proxy.counts)
    os._exit(0)  # with connections open


def once(*faults: str, methods: Sequence[str] = ("PUT",)) -> dict[str, Any]:
    """Settings with which the next requests of these methods have these faults, and all others pass."""
    return {"script": list(faults), "methods": list(methods)}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
