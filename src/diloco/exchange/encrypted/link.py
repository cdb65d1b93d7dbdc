"""The encrypted link between two processes: frames that each side asks for before the other sends them.

A link is two TLS connections, since two threads can't use one at once: each end sends on one and receives on the
other. A frame is a header, and for a part of a message its bytes:

    READY  tag, length          the receiver has memory for a message of this length
    PART   tag, offset, length  a part of it, at most 1 MiB, so that a READY never waits long behind a message

Bytes that were not asked for end the link: a peer can fill only memory that a receive has set aside.
"""

import ssl
import struct
from collections import deque
from datetime import timedelta
from threading import Condition, Event, Thread

from torch import Tensor

from diloco.exchange.encrypted.tls import fill, shut

_HEADER = struct.Struct("<BIQQ")
_READY, _PART = 1, 2
_PART_BYTES = 1 << 20
_MOST_REQUESTS = 1 << 14
_SECONDS_TO_END = 1.0


class Operation:
    """A message on its way: a torch.distributed.Work, as far as an exchange uses it."""

    def __init__(self, link: "Link", tensor: Tensor, tag: int) -> None:
        assert tensor.is_contiguous() and tensor.element_size() == 1, "payloads are flat bytes"
        self.tag = tag
        self.view = tensor.numpy().data.cast("B") if tensor.numel() else memoryview(b"")
        self.position = 0
        """Number of bytes that have come or gone."""
        self.error: str | None = None
        self.over = Event()
        self._link = link

    def wait(self, timeout: timedelta) -> bool:
        """Wait until the message is over; closes the link if the time is over first.

        Raises:
            RuntimeError: if the link fails.
        """
        if not self.over.wait(timeout.total_seconds()):
            reason = f"nothing came or went within {timeout.total_seconds():g} s"
            self._link.fail(reason)
            if not self.over.wait(_SECONDS_TO_END):
                self.end(reason)
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def end(self, error: str | None = None) -> None:
        """Wake up the thread that waits; the first end counts."""
        if not self.over.is_set():
            self.error = error
            self.over.set()


class Link:
    """The link to one process.

    Args:
        outgoing: this process sends on it.
        incoming: this process receives on it.
    """

    def __init__(self, outgoing: ssl.SSLSocket, incoming: ssl.SSLSocket) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._changed = Condition()
        self._error: str | None = None
        self._receives: dict[int, deque[Operation]] = {}
        self._sends: dict[int, deque[Operation]] = {}
        self._requests: dict[int, deque[int]] = {}
        self._num_requests = 0
        self._announcements: deque[bytes] = deque()
        self._sending: deque[Operation] = deque()
        self._current: Operation | None = None
        for target in (self._send_all, self._receive_all):
            Thread(target=target, name="link", daemon=True).start()

    def send(self, tensor: Tensor, tag: int) -> Operation:
        """Send a message once the other end has asked for it."""
        operation = Operation(self, tensor, tag)
        with self._changed:
            self._check()
            self._sends.setdefault(tag, deque()).append(operation)
            try:
                self._match(tag)
            except _HostileError as error:
                reason = str(error)
            else:
                return operation
        self.fail(reason)
        raise RuntimeError(reason)

    def receive(self, tensor: Tensor, tag: int) -> Operation:
        """Ask for a message as long as a tensor, and receive it there."""
        operation = Operation(self, tensor, tag)
        with self._changed:
            self._check()
            self._receives.setdefault(tag, deque()).append(operation)
            self._announcements.append(_HEADER.pack(_READY, tag, 0, len(operation.view)))
            self._changed.notify()
        return operation

    def fail(self, reason: str) -> None:
        """Close the link, and end every message on it."""
        with self._changed:
            if self._error is not None:
                return
            self._error = reason
            # The sending thread ends its own message: the other end may have all of it, and be gone already.
            pending = [operation for operation in self._sending if operation is not self._current]
            for queues in (self._receives, self._sends):
                pending += [operation for queue in queues.values() for operation in queue]
                queues.clear()
            self._sending.clear()
            self._changed.notify()
        for operation in pending:
            operation.end(reason)
        shut(self._outgoing)
        shut(self._incoming)

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    def _match(self, tag: int) -> None:
        """Start to send what both sides have named; the condition is held."""
        sends, requests = self._sends.get(tag), self._requests.get(tag)
        if not sends or not requests:
            return
        operation, length = sends.popleft(), requests.popleft()
        self._num_requests -= 1
        for queues in (self._sends, self._requests):
            if not queues[tag]:
                del queues[tag]
        if length != len(operation.view):
            sends.appendleft(operation)
            self._sends[tag] = sends
            raise _HostileError(f"it expects {length} bytes where {len(operation.view)} are sent")
        self._sending.append(operation)
        self._changed.notify()

    def _send_all(self) -> None:
        """Send announcements first, then the parts of messages in turn, until the link ends (a thread)."""
        try:
            while True:
                with self._changed:
                    while not (self._announcements or self._sending or self._error is not None):
                        self._changed.wait()
                    if self._error is not None:
                        break
                    announcement = self._announcements.popleft() if self._announcements else None
                    self._current = self._sending[0] if announcement is None else None
                if announcement is not None:
                    self._outgoing.sendall(announcement)
                if self._current is not None:
                    self._send_part(self._current)
        except OSError as error:
            self.fail(_closed(error))
        if self._current is not None:
            self._current.end(self._error)
        self._outgoing.close()

    def _send_part(self, operation: Operation) -> None:
        part = operation.view[operation.position : operation.position + _PART_BYTES]
        self._outgoing.sendall(_HEADER.pack(_PART, operation.tag, operation.position, len(part)))
        if part:
            self._outgoing.sendall(part)
        operation.position += len(part)
        if operation.position == len(operation.view):
            with self._changed:
                if self._sending and self._sending[0] is operation:
                    self._sending.popleft()
            operation.end()

    def _receive_all(self) -> None:
        """Take requests and the parts of messages, until the link ends (a thread)."""
        header = memoryview(bytearray(_HEADER.size))
        try:
            while True:
                fill(self._incoming, header)
                kind, tag, offset, length = _HEADER.unpack(header)
                if kind == _READY:
                    self._take_request(tag, length)
                elif kind == _PART:
                    self._receive_part(tag, offset, length)
                else:
                    raise _HostileError("it sent what is no frame")
        except _HostileError as error:
            self.fail(f"{error}: the link is closed")
        except OSError as error:
            self.fail(_closed(error))
        self._incoming.close()

    def _take_request(self, tag: int, length: int) -> None:
        with self._changed:
            if self._num_requests >= _MOST_REQUESTS:
                raise _HostileError("it asks for too many messages at once")
            self._num_requests += 1
            self._requests.setdefault(tag, deque()).append(length)
            self._match(tag)

    def _receive_part(self, tag: int, offset: int, length: int) -> None:
        """Read a part into the oldest message of its tag that is waited for; refuse one that does not fit."""
        with self._changed:
            queue = self._receives.get(tag)
            operation = queue[0] if queue else None
        if operation is None:
            raise _HostileError("it sent a message that nobody asked for")
        if offset != operation.position or length > min(len(operation.view) - offset, _PART_BYTES):
            raise _HostileError(f"it sent {length} bytes at {offset} of a message of {len(operation.view)}")
        if not length and len(operation.view):
            raise _HostileError("it sent a part without bytes")
        fill(self._incoming, operation.view[offset : offset + length])
        operation.position += length
        if operation.position == len(operation.view):
            with self._changed:
                if (queue := self._receives.get(tag)) is not None and queue[0] is operation:
                    queue.popleft()
                    if not queue:
                        del self._receives[tag]
            operation.end()


class _HostileError(RuntimeError):
    """A frame that no replica of ours sends."""


def _closed(error: OSError) -> str:
    text = str(error.strerror or error)
    return text if "closed" in text else f"the connection broke off ({text})"
