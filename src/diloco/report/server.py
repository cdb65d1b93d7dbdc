"""The server of the live page: two resources, for this machine's own browsers alone."""

import re
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from diloco.errors import UserError
from diloco.report.page import SERVED_POLICY, document
from diloco.report.sources import Sources

ADDRESS = "127.0.0.1"
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?", re.IGNORECASE)
"""A Host header that names the loopback interface, with any port: a tunnel has its own."""
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

    A request whose Host is not this machine's loopback name is refused: another site's page, to whose name a DNS
    server gives this address, is not answered.

    Args:
        sources: what is shown.
        title: of the page.
        port: on which it listens; 0 is any that is free.

    Raises:
        UserError: if the port can't be used.
    """

    def __init__(self, sources: Sources, *, title: str, port: int = 0) -> None:
        self._sources, self._lock, self._made, self._content = sources, threading.Lock(), float("-inf"), b""
        page = document(title, None)
        resources: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", lambda: page),
            "/page.json": ("application/json", self._fresh_content),
        }
        try:
            self._server = _Server((ADDRESS, port), _handler(resources))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it must be below 65536"
            raise UserError(f"port={port} can't be used ({reason}): choose a free one", "port") from error
        self.url = f"http://{ADDRESS}:{self._server.server_port}/"

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


class _Server(ThreadingHTTPServer):
    """A server that says nothing where a browser has gone away, which it may at any time."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of a bug."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


def _handler(resources: dict[str, tuple[str, Callable[[], bytes]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD of the resources."""

        timeout = 10  # seconds for a request to come

        def do_GET(self) -> None:
            """Send a resource."""
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not _OWN_HOST.fullmatch(hosts[0]):
                return self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"this host is not served\n")
            if self.path not in resources:
                return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")
            kind, make = resources[self.path]
            return self._send(HTTPStatus.OK, kind, make())

        do_HEAD = do_GET

        def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
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
