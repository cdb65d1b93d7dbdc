"""Requests to the live page: GET of resources, and POST to streams, for this machine's own pages."""

import re
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import ClassVar

from diloco.errors import DilocoError

Resource = tuple[str, Callable[[], bytes]]
"""A content type, and a function that makes the content."""
Stream = Callable[[bytes], Generator[bytes, None, None]]
"""A function from the body of a POST to the parts of the answer; before the first it may raise a `DilocoError`."""
_MOST_REQUEST_BYTES = 1 << 17
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(:[0-9]+)?", re.IGNORECASE)
"""A Host header, with any port: a tunnel has its own."""
_HEADERS = {
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class BusyError(DilocoError):
    """A stream has too much to do, and answers later."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the resources, and POST to the streams; a server's own subclass names them."""

    resources: ClassVar[Mapping[str, Resource]]
    """The resources by path."""
    streams: ClassVar[Mapping[str, Stream]]
    """The streams by path."""
    names: ClassVar[set[str]]
    """Values of Host, without ports, that are answered, beside the number that a request came to."""
    token: ClassVar[str]
    """The first part of each path; empty if there is none."""
    policy: ClassVar[str]
    """The Content-Security-Policy."""
    timeout = 10  # seconds for a request to come, and for a part of an answer to be taken

    def do_GET(self) -> None:
        """Send a resource."""
        if not self._is_for_us():
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, "this host is not served")
        path = self._own_path()
        if path is None or path not in self.resources:
            return self._send(HTTPStatus.NOT_FOUND, "there is no such page")
        kind, make = self.resources[path]
        return self._send(HTTPStatus.OK, make(), kind)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Send the parts of a stream as they come, to this server's own page, or to a program."""
        refusal = self._refusal()
        if refusal is not None:
            return self._send(*refusal)
        stream = self.streams[self._own_path() or ""]
        with closing(stream(self.rfile.read(int(self.headers["Content-Length"])))) as parts:
            try:
                first = next(parts)
            except BusyError as error:
                return self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            except DilocoError as error:
                return self._send(HTTPStatus.BAD_REQUEST, str(error))
            self._send_head(HTTPStatus.OK, {"Content-Type": "application/x-ndjson"})
            for part in chain([first], parts):
                self.wfile.write(part)
        return None

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        """The reason not to answer a POST: the page of another site could make this machine work by one."""
        headers = self.headers
        if not self._is_for_us():
            return HTTPStatus.MISDIRECTED_REQUEST, "this host is not served"
        if self._own_path() not in self.streams:
            return HTTPStatus.NOT_IMPLEMENTED, "nothing can be sent to this page"
        origins, sites = headers.get_all("Origin", []), headers.get_all("Sec-Fetch-Site", [])
        own = {f"{scheme}://{headers['Host']}".lower() for scheme in ("http", "https")}
        if not {origin.lower() for origin in origins} <= own or not {*sites} <= {"same-origin"}:
            return HTTPStatus.FORBIDDEN, "the page of another site asks"
        if headers.get_content_type() != "application/json":  # a browser asks us before it sends this for a site
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the content must be application/json"
        length = headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            return HTTPStatus.LENGTH_REQUIRED, "the length of the content is not named"
        if len(length) > 9 or int(length) > _MOST_REQUEST_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the content has more than {_MOST_REQUEST_BYTES:,} bytes"
        return None

    def _is_for_us(self) -> bool:
        """True if the request's Host is this server's: no site can reach it by a name of its own."""
        hosts = self.headers.get_all("Host", [])
        host = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        here = self.connection.getsockname()[0].removeprefix("::ffff:")  # IPv4 at a socket of both families
        return host is not None and host[1].lower() in {*self.names, bracketed(here)}

    def _own_path(self) -> str | None:
        """The path behind the token; None without the right one."""
        if not self.token:
            return self.path
        _, first, *rest = self.path.split("/", 2) if self.path.startswith("/") else ("", "")
        is_right = secrets.compare_digest(first.encode(errors="replace"), self.token.encode())
        return "/" + "".join(rest) if is_right else None

    def _send(self, status: HTTPStatus, content: bytes | str, kind: str = "text/plain; charset=utf-8") -> None:
        """Answer with a content, or with a line of text."""
        content = f"{content}\n".encode(errors="replace") if isinstance(content, str) else content
        self._send_head(status, {"Content-Type": kind, "Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_head(self, status: HTTPStatus, fields: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**fields, "Content-Security-Policy": self.policy, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        """The program's name alone: strangers need no version."""
        return "diloco"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
