"""The server of the live page: two resources, for this machine's own browsers, or with a token for others."""

import base64
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from diloco.errors import UserError
from diloco.report.page import SERVED_POLICY, document
from diloco.report.sources import Sources

ADDRESS = "127.0.0.1"
Resource = tuple[str, Callable[[], bytes]]
"""A content type, and a function that makes the content."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(:[0-9]+)?", re.IGNORECASE)
"""A Host header, with any port: a tunnel has its own."""
_OWN_NAMES = {"127.0.0.1", "localhost", "[::1]"}
_FRESH_SECONDS = 1.0
_HEADERS = {
    "Content-Security-Policy": SERVED_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


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

    Raises:
        UserError: if the address or the port can't be used.
    """

    def __init__(self, sources: Sources, *, title: str, port: int = 0, address: str = ADDRESS) -> None:
        self._sources, self._lock, self._made, self._content = sources, threading.Lock(), float("-inf"), b""
        page = document(title, None)
        resources: dict[str, Resource] = {
            "/": ("text/html; charset=utf-8", lambda: page),
            "/page.json": ("application/json", self._fresh_content),
        }
        family, place = _resolved(address, port)
        is_own = ip_address(place[0].partition("%")[0]).is_loopback
        self.is_open = not is_own
        """True if other machines may be answered."""
        token = "" if is_own else base64.b32encode(secrets.token_bytes(10)).decode().lower()
        names = _OWN_NAMES | {_bracketed(address).lower(), _bracketed(place[0])}
        kind = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server = kind(place, handler_of(resources, names=names, token=token))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it must be below 65536"
            fields = ("port",) if is_own else ("address", "port")
            where = f"port={port}" if is_own else f"port={port} of address={address}"
            raise UserError(f"{where} can't be used ({reason}): choose a free one", *fields) from error
        host = _outer_address(family) if place[0] in ("0.0.0.0", "::") else place[0]
        self.url = f"http://{_bracketed(host)}:{self._server.server_port}/{f'{token}/' if token else ''}"
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


def _bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


class _Server(ThreadingHTTPServer):
    """A server that says nothing where a browser has gone away, which it may at any time."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of a bug."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


def handler_of(resources: Mapping[str, Resource], *, names: set[str], token: str) -> type[BaseHTTPRequestHandler]:
    """A handler that answers GET and HEAD of resources.

    Args:
        resources: by path.
        names: values of Host, without ports, that are answered, beside the number that a request came to.
        token: the first part of each path; empty if there is none.
    """

    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD of the resources."""

        timeout = 10  # seconds for a request to come

        def do_GET(self) -> None:
            """Send a resource."""
            if not self.is_for_us():
                return self.send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"this host is not served\n")
            path = self.own_path()
            if path is None or path not in resources:
                return self.send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")
            kind, make = resources[path]
            return self.send(HTTPStatus.OK, kind, make())

        do_HEAD = do_GET

        def is_for_us(self) -> bool:
            """True if the request's Host is this server's: no site can reach it by a name of its own."""
            hosts = self.headers.get_all("Host", [])
            host = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
            number = _bracketed(self.connection.getsockname()[0])
            return host is not None and host[1].lower() in {*names, number}

        def own_path(self) -> str | None:
            """The path behind the token; None without the right one."""
            if not token:
                return self.path
            _, first, *rest = self.path.split("/", 2) if self.path.startswith("/") else ("", "")
            is_right = secrets.compare_digest(first.encode(errors="replace"), token.encode())
            return "/" + "".join(rest) if is_right else None

        def send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
            """Answer."""
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **_HEADERS}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def version_string(self) -> str:
            """The program's name alone: strangers need no version."""
            return "diloco"

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler
