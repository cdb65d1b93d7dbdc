"""The server of the live page, for this machine's own browsers, or with a token for others."""

import base64
import secrets
import socket
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from diloco.errors import UserError
from diloco.report.chat import PANEL, Chat
from diloco.report.handler import Handler, Resource, Stream, bracketed
from diloco.report.page import document, served_policy
from diloco.report.sources import Sources

ADDRESS = "127.0.0.1"
_OWN_NAMES = {"127.0.0.1", "localhost", "[::1]"}
_FRESH_SECONDS = 1.0


class LiveServer:
    """Serves the document at `/` and its content at `/page.json`, which is made when it is asked for.

    A request whose Host is neither a name of this machine's loopback interface nor the address that it came to is
    refused: another site's page, to whose name a DNS server gives this address, is not answered. On an address
    that other machines reach, all resources lie below a random token, which only `url` names.

    Args:
        sources: what is shown.
        title: of the page.
        port: on which it listens; 0 is any that is free.
        address: on which it listens, a name or a number of this machine's; 0.0.0.0 is every one.
        chat: answers POST to `/chat`, with a panel on the page.

    Raises:
        UserError: if the address or the port can't be used.
    """

    def __init__(
        self, sources: Sources, *, title: str, port: int = 0, address: str = ADDRESS, chat: Chat | None = None
    ) -> None:
        self._sources, self._lock, self._made, self._content = sources, threading.Lock(), float("-inf"), b""
        panel = None if chat is None else PANEL
        page = document(title, None, panel=panel)
        resources: dict[str, Resource] = {
            "/": ("text/html; charset=utf-8", lambda: page),
            "/page.json": ("application/json", self._fresh_content),
        }
        streams: dict[str, Stream] = {}
        if chat is not None:
            resources["/chat.json"] = ("application/json", lambda: self._chat_content(chat))
            streams["/chat"] = chat.answer
        family, place = _resolved(address, port)
        is_own = ip_address(place[0].partition("%")[0]).is_loopback
        self.is_open = not is_own
        """True if other machines may be answered."""
        token = "" if is_own else base64.b32encode(secrets.token_bytes(10)).decode().lower()
        host = _outer_address(family) if place[0] in ("0.0.0.0", "::") else place[0]
        names = _OWN_NAMES | {bracketed(name).lower() for name in (address, place[0], host)}
        own = {"names": names, "token": token, "policy": served_policy(panel)}
        handler = type("_Handler", (Handler,), {"resources": resources, "streams": streams, **own})
        try:
            self._server = type("_Server", (_Server,), {"address_family": family})(place, handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it must be below 65536"
            fields = ("port",) if is_own else ("address", "port")
            where = f"port={port}" if is_own else f"port={port} of address={address}"
            raise UserError(f"{where} can't be used ({reason}): choose a free one", *fields) from error
        self.url = f"http://{bracketed(host)}:{self._server.server_port}/{f'{token}/' if token else ''}"
        """The address of the page, with the token."""

    def serve(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Free the port; `serve` returns."""
        self._server.shutdown()
        self._server.server_close()

    def _fresh_content(self) -> bytes:
        """The content of a moment ago, for however many browsers."""
        with self._lock:
            if time.monotonic() - self._made > _FRESH_SECONDS:
                self._sources.again()
                self._content, self._made = self._sources.page().as_json(), time.monotonic()
            return self._content

    def _chat_content(self, chat: Chat) -> bytes:
        with self._lock:
            self._sources.again()
            return chat.content(self._sources.runs)


def _resolved(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The family and the numbers of an address to listen on."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"address={address} is no address of this machine ({reason})", "address") from error
    return family, (place[0], port, *place[2:])


def _outer_address(family: socket.AddressFamily) -> str:
    """The address by which others reach this machine, if it has one; nothing is sent."""
    far = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


_MOST_CONNECTIONS = 64
"""Connections at once, each of which has a thread; a browser opens six."""


class _Server(ThreadingHTTPServer):
    """A server of a bounded number of connections; it says nothing where a browser has gone away."""

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """False if there are too many connections: this one is closed then."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of the connection's own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of a bug."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # pyrefly: ignore[bad-argument-type]
