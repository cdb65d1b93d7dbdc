"""The listener of a process: who proves that it belongs to the run, and is expected, comes in.

Handshakes take place in threads of their own. There are never more than a few: the oldest one gives way to the
newest, so that connections that send nothing, however many, keep out nobody who has the proof.
"""

import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

from diloco.exchange.tls import SECONDS_TO_SHAKE_HANDS, Security, accept, purpose_of, refusal

_LOG = logging.getLogger("diloco")

Handler = Callable[[ssl.SSLSocket], None]


class Door:
    """The listener of a process.

    Args:
        listener: a socket that listens; the door closes it.
        security: the proof.
    """

    def __init__(self, listener: socket.socket, security: Security) -> None:
        self.refused: str | None = None
        """The sentence for the last process with another proof."""
        self._listener, self._security = listener, security
        self._lock = Lock()
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        self._in_handshake: deque[ssl.SSLSocket] = deque()
        self._inside: set[ssl.SSLSocket] = set()
        self._next_warning = 0.0
        self._is_open = True
        Thread(target=self._accept_all, name="door", daemon=True).start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return self._listener.getsockname()[1]

    def expect(self, purpose: str, handler: Handler, *, once: bool) -> None:
        """Hand each connection for a purpose, or the first one alone, to a handler, in a thread of its own."""
        with self._lock:
            self._handlers[purpose] = (handler, once)

    def close(self) -> None:
        """Stop to listen, and end the connections for purposes that are not `once`."""
        with self._lock:
            self._is_open = False
            everyone: list[socket.socket] = [self._listener, *self._in_handshake, *self._inside]
        for each in everyone:
            shut(each)
        self._listener.close()

    def _accept_all(self) -> None:
        while self._is_open:
            try:
                plain, where = self._listener.accept()
            except OSError:
                time.sleep(0.01)  # no more files, for a moment; or the door is closed
                continue
            try:
                plain.settimeout(SECONDS_TO_SHAKE_HANDS)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = self._security.server.wrap_socket(
                    plain, server_side=True, do_handshake_on_connect=False
                )
            except OSError:
                plain.close()  # it has left already
                continue
            with self._lock:
                self._in_handshake.append(connection)
                if len(self._in_handshake) > _MOST_HANDSHAKES:
                    shut(self._in_handshake.popleft())
            try:
                Thread(target=self._let_in, args=(connection, where[0]), name="handshake", daemon=True).start()
            except RuntimeError:  # no more threads, for a moment
                self._forget(connection)

    def _let_in(self, connection: ssl.SSLSocket, who: str) -> None:
        """Shake hands, and hand the connection on."""
        try:
            purpose = purpose_of(connection)
        except ssl.SSLError as error:
            self._warn(refusal(f"a process at {who}", error, self._security))
            return self._forget(connection)
        except (OSError, ValueError):
            return self._forget(connection)
        with self._lock:
            if connection in self._in_handshake:
                self._in_handshake.remove(connection)
            handler, once = self._handlers.get(purpose, (None, False))
            if handler is None or not self._is_open or len(self._inside) >= _MOST_INSIDE:
                handler, once = None, False
            elif once:
                del self._handlers[purpose]
            self._inside.add(connection)
        try:
            if handler is not None:
                accept(connection)
                handler(connection)
        except OSError:  # it has left
            if once and handler is not None:
                self.expect(purpose, handler, once=True)
                once = False
        with self._lock:
            self._inside.discard(connection)
        if not once:
            connection.close()
        return None

    def _forget(self, connection: ssl.SSLSocket) -> None:
        with self._lock, suppress(ValueError):
            self._in_handshake.remove(connection)
        connection.close()

    def _warn(self, sentence: str) -> None:
        self.refused = sentence
        if (now := time.monotonic()) >= self._next_warning:
            self._next_warning = now + _SECONDS_BETWEEN_WARNINGS
            _LOG.warning("refused a connection: %s", sentence)


_MOST_HANDSHAKES = 64
_MOST_INSIDE = 4096
_SECONDS_BETWEEN_WARNINGS = 10.0


def shut(connection: socket.socket) -> None:
    """End both directions of a connection, and wake up the thread that uses it."""
    with suppress(OSError):
        # Not SSLSocket's own, which would take the TLS state from the thread that uses it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
