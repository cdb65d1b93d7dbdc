"""Hugging Face buckets by their S3 gateway, on loopback: what its documentation says of it, and no more.

https://huggingface.co/docs/hub/storage-buckets-s3: a bucket NAMESPACE/NAME is the bucket NAME at an endpoint that
ends with the namespace; the region is us-east-1; a condition holds for PUT alone; GET is answered by a redirect to
another host, whose address carries the right to read; neither version 1 of ListObjects nor chunks with trailing
checksums are understood.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

NAMESPACE, BUCKET, ACCESS_KEY = "somebody", "runs", "HFAKtest"


class _Gateway(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            return self.refuse(400, "InvalidRequest")
        if (key := self.key()) is None:
            return None
        if not key or re.search(r"^/|/$|//|\.\./|^\./|\.\.$|[\\\0]", key):
            return self.refuse(400, "InvalidArgument")
        with self.server.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.server.objects:
                return self.refuse(412, "PreconditionFailed")
            self.server.objects[key] = body
        return self.answer(200, b"", ETag='"e"')

    def do_GET(self) -> None:
        if (key := self.key()) is None:
            return None
        if not key:
            return self.list_objects({name: values[0] for name, values in self.query().items()})
        if key not in self.server.objects:
            return self.refuse(404, "NoSuchKey")
        return self.answer(302, b"", Location=f"{self.server.edge}/{quote(key)}?signature=right")

    def list_objects(self, query: dict[str, str]) -> None:
        if query.get("list-type") != "2":
            return self.refuse(501, "NotImplemented")
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        after = query.get("continuation-token", after)
        keys = [key for key in sorted(self.server.objects) if key.startswith(prefix) and key > after]
        page, rest = keys[:2], keys[2:]  # every list has pages
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key])}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        text = f"<ListBucketResult><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{token}{contents}"
        return self.answer(200, f"{text}</ListBucketResult>".encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.key() is None:
            return
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            self.server.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def key(self) -> str | None:
        """The object's name in the bucket; None after a refusal."""
        scope = rf"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/\d+/us-east-1/s3/aws4_request"
        if not re.match(scope, self.headers.get("Authorization", "")):
            return self.refuse(403, "InvalidAccessKeyId")
        bucket, _, key = unquote(urlsplit(self.path).path).removeprefix(f"/{NAMESPACE}/").partition("/")
        return key if bucket == BUCKET else self.refuse(404, "NoSuchBucket")

    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)

    def refuse(self, status: int, code: str) -> None:
        return self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Edge(_Gateway):
    def do_GET(self) -> None:
        if "Authorization" in self.headers or self.query() != {"signature": ["right"]}:
            return self.refuse(400, "InvalidArgument")  # as stores do where a request is signed twice
        body = self.server.gateway.objects[unquote(urlsplit(self.path).path)[1:]]
        return self.answer(200, body, ETag='"e"')


@contextmanager
def running_hugging_face() -> Iterator[str]:
    """The endpoint."""
    gateway, edge = (ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (_Gateway, _Edge))
    edge_url = f"http://127.0.0.1:{edge.server_port}"
    vars(gateway).update(lock=threading.Lock(), objects={}, edge=edge_url)
    vars(edge).update(gateway=gateway)
    for server in (gateway, edge):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{gateway.server_port}"
    finally:
        for server in (gateway, edge):
            server.shutdown()
            server.server_close()
