"""Mutual authentication of the processes of a run: TLS 1.3 with a shared secret, or with certificates.

A process dials another one's door, and names the purpose of the connection once both have proved themselves; the
other answers with one byte if it expects that purpose.

From the secret comes one Ed25519 key, the same for all. Each process presents the self-signed certificate of that
key, and trusts that certificate alone. Everybody who connects sees the certificate, and could try secrets against
it: so a secret must be random, and scrypt makes each try slow.
"""

import hashlib
import logging
import os
import secrets
import socket
import ssl
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock, Thread

from diloco.errors import ExchangeError, UserError
from diloco.files import requiring

with requiring("cryptography", extra="store"):
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

_LOG = logging.getLogger("diloco")

SECONDS_TO_SHAKE_HANDS = 10.0
"""Longest wait of one end for the other's part of the handshake."""


@dataclass(frozen=True)
class Security:
    """The proof that a process belongs to the run, and the check of the others' proof."""

    setting: str
    """The proof in messages: where it comes from, and what must be the same on all replicas."""
    server: ssl.SSLContext
    """The context of connections that come in."""
    client: ssl.SSLContext
    """The context of connections that go out."""


def security_of(secret: str | None, certificates: str | os.PathLike[str] | None) -> Security:
    """The proof by a secret, or by a directory of certificates.

    Raises:
        UserError: if both are given, the secret is short, or a file of the certificates can't be used.
    """
    if secret is not None and certificates is not None:
        raise UserError("give secret or certificates, not both", "secret", "certificates")
    if secret is not None:
        return _from_secret(secret)
    assert certificates is not None, "a proof is one of the two"
    return _from_files(Path(certificates))


def dial(address: str, purpose: str, security: Security) -> ssl.SSLSocket:
    """A connection to the process that listens at host:port, which knows the purpose and has agreed.

    Raises:
        OSError: if nobody listens there.
        ExchangeError: if the other process has another proof, or none, or expects nothing for this purpose.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + SECONDS_TO_SHAKE_HANDS
    while True:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_SHAKE_HANDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = security.client.wrap_socket(plain, do_handshake_on_connect=False)
        try:
            connection.do_handshake()
            connection.sendall(bytes([len(purpose.encode())]) + purpose.encode())
            if connection.recv(1) == _WELCOME:
                connection.settimeout(None)
                return connection
            problem = "closed the connection"
        except (ssl.SSLEOFError, TimeoutError, ConnectionError) as error:
            problem = f"gave no answer ({error.args[-1] if error.args else error})"
        except ssl.SSLError as error:
            connection.close()
            raise ExchangeError(_refusal(f"the process at {address}", error, security)) from None
        connection.close()
        # A listener that is flooded drops connections: another try may come through.
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"the process at {address} {problem}: start all replicas with the same {security.setting}"
            )
        time.sleep(0.2)


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
        """Let each connection shake hands in a thread of its own; of too many the oldest is shut."""
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
            purpose = _purpose_of(connection)
        except ssl.SSLError as error:
            self._warn(_refusal(f"a process at {who}", error, self._security))
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
                connection.sendall(_WELCOME)
                connection.settimeout(None)
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


def _purpose_of(connection: ssl.SSLSocket) -> str:
    """The purpose of a connection that has come in, once the other end has proved itself.

    Raises:
        OSError: if it proves nothing; ssl.SSLError is one.
        ValueError: if the purpose is no text.
    """
    connection.do_handshake()
    length = connection.recv(1)
    return receive_exactly(connection, length[0]).decode() if length else ""


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as the memory holds.

    Raises:
        ConnectionError: if the connection ends before.
    """
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise ConnectionError("it closed the connection")
        view = view[num_bytes:]


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """The next bytes of a connection, which are few; raises as `fill` does."""
    received = bytearray(num_bytes)
    fill(connection, memoryview(received))
    return bytes(received)


def _refusal(who: str, error: ssl.SSLError, security: Security) -> str:
    """The sentence for a handshake that failed."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if any(sign in reason for sign in _SIGNS_OF_ANOTHER_PROOF):
        return f"{who} has another {security.setting}: give all replicas the same"
    return f"{who} proves nothing ({reason}): give all replicas the same {security.setting}"


_WELCOME = b"\x01"
_SIGNS_OF_ANOTHER_PROOF = ("certificate verify failed", "unknown ca", "decrypt error", "bad certificate")
_LEAST_CHARACTERS = 16
_COST = {"n": 1 << 15, "r": 8, "p": 1}  # 32 MiB and a tenth of a second
_FILES = ("tls.crt", "tls.key", "ca.crt")


def _from_secret(secret: str) -> Security:
    """TLS by a certificate and its key that all processes derive from the secret."""
    if len(secret) < _LEAST_CHARACTERS:
        raise UserError(
            f"secret has {len(secret)} characters and must have at least {_LEAST_CHARACTERS}, random ones: make "
            "one with `python -c 'import secrets; print(secrets.token_hex(16))'`, and give it to all replicas, as "
            "the argument or as DILOCO_SECRET in the environment",
            "secret",
        )
    seed = hashlib.scrypt(secret.encode(), salt=b"diloco.connect", maxmem=1 << 26, dklen=32, **_COST)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "diloco")])
    # All of it is fixed, so that all processes make the same bytes; clocks need not agree.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(2200, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
        .public_bytes(Encoding.PEM)
    )
    password = secrets.token_bytes(32).hex().encode()  # without it the file is worth nothing
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in _FILES]
        for path, text in zip(paths, (certificate, private, certificate), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(text)
        return _contexts(paths, "secret (DILOCO_SECRET)", password)


def _from_files(folder: Path) -> Security:
    """TLS by the certificates in a directory."""
    paths = [folder / name for name in _FILES]
    for path in paths:
        if not path.is_file():
            raise UserError(
                f"certificates={folder}: {path.name} is missing; the directory holds {', '.join(_FILES)} in PEM: "
                "this process's certificate, its key, and the authority that signed those of all replicas",
                "certificates",
            )
    try:
        return _contexts(paths, "authority of certificates (DILOCO_CERTIFICATES)", b"")
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"certificates={folder}: {', '.join(_FILES)} can't be used ({error.strerror or error}): take PEM "
            "files, a key without a password, and the certificate of that key",
            "certificates",
        ) from None


def _contexts(paths: list[Path], setting: str, password: bytes) -> Security:
    """TLS 1.3 for both ends, each of which asks for the other's certificate."""
    certificate, key, authority = paths
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the authority is the run's own
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key, password)
        context.load_verify_locations(authority)
        contexts.append(context)
    # A ticket that nobody reads would reset the connection at its end.
    contexts[0].num_tickets = 0
    return Security(setting, *contexts)
