"""The session of a process: its encrypted connections, and the board on which all processes read and write.

Replica 0 holds the board, which has the methods of torch's stores that an exchange uses. A request and its
answer are MessagePack behind four bytes of length. Everything is bounded: requests, keys, the number of keys,
and what all values hold.
"""

import os
import ssl
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Annotated, Literal, TypeVar

import msgspec
from torch import Tensor

from diloco.errors import ExchangeError, UserError
from diloco.exchange.encrypted.link import Link, Operation
from diloco.exchange.encrypted.tls import Door, Security, dial, receive_exactly, security_of, shut
from diloco.exchange.meeting import Meeting, listen

T = TypeVar("T")


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One operation on one key."""

    operation: Literal["set", "get", "add", "check", "compare_set"]
    key: Annotated[str, msgspec.Meta(max_length=256)]
    value: bytes = b""
    number: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)] = 0


Answer = bytes | int | bool


class Board(ABC):
    """Short values by their keys, in this process or in another; a `Store`."""

    @abstractmethod
    def ask(self, request: Request) -> Answer:
        """The answer to a request.

        Raises:
            ValueError: if the board can't do what the request asks.
            ExchangeError: if the process that holds the board is gone.
        """

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self._answer(Request("set", key, value.encode()), bool)

    def get(self, key: str, /) -> bytes:
        """A value that is there."""
        return self._answer(Request("get", key), bytes)

    def add(self, key: str, number: int, /) -> int:
        """Add to a number, which begins at 0, and return the sum."""
        return self._answer(Request("add", key, number=number), int)

    def check(self, keys: Sequence[str], /) -> bool:
        """True if all keys are there."""
        return all(self._answer(Request("check", key), bool) for key in keys)

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value unless there is one; returns the value that is there then."""
        assert not expected, "only the first value is ever compared"
        return self._answer(Request("compare_set", key, value.encode()), bytes)

    def _answer(self, request: Request, kind: type[T]) -> T:
        try:
            answer = self.ask(request)
        except ValueError as error:
            raise ExchangeError(f"the board of the exchange: {error}") from None
        if not isinstance(answer, kind):
            raise ExchangeError(f"replica 0 answers {request.operation} with {type(answer).__name__}")
        return answer


class OwnBoard(Board):
    """The board where its values lie: in the first process of replica 0."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._lock = Lock()

    def ask(self, request: Request) -> Answer:
        """Do what a request asks.

        Raises:
            ValueError: if the board is full, a key is missing, or adds to what is no number.
        """
        with self._lock:
            present = self._values.get(request.key)
            match request.operation:
                case "check":
                    return present is not None
                case "get":
                    if present is None:
                        raise ValueError(f"there is no {request.key}")
                    return present
                case "set":
                    self._write(request.key, request.value)
                    return True
                case "compare_set":
                    if present is None:
                        self._write(request.key, request.value)
                    return self._values[request.key]
                case "add":
                    total = int(present or b"0") + request.number
                    self._write(request.key, str(total).encode())
                    return total

    def _write(self, key: str, value: bytes) -> None:
        others = self._num_bytes - len(self._values.get(key, b""))
        if (key not in self._values and len(self._values) >= _MOST_KEYS) or others + len(value) > _MOST_BYTES:
            raise ValueError("the board is full")
        self._values[key] = value
        self._num_bytes = others + len(value)

    def serve(self, connection: ssl.SSLSocket) -> None:
        """Answer the requests of one process until it leaves, or sends an invalid request."""
        try:
            while True:
                request = _REQUESTS.decode(_receive(connection, _MOST_REQUEST_BYTES))
                _send(connection, self.ask(request))
        except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return


class RemoteBoard(Board):
    """The board of replica 0, in another process.

    Args:
        connection: used for nothing else.
        seconds: how long an answer may take.
    """

    def __init__(self, connection: ssl.SSLSocket, seconds: float) -> None:
        self._connection: ssl.SSLSocket | None = connection
        self._lock = Lock()
        connection.settimeout(seconds)

    def ask(self, request: Request) -> Answer:
        """The answer to a request.

        Raises:
            ExchangeError: if the board is gone.
        """
        with self._lock:
            if self._connection is None:
                raise ExchangeError("the connection to replica 0 is closed")
            try:
                _send(self._connection, request)
                return _ANSWERS.decode(_receive(self._connection, _MOST_REQUEST_BYTES))
            except (OSError, ValueError, RecursionError) as error:
                self._connection.close()
                self._connection = None
                raise ExchangeError(f"the connection to replica 0 broke off: {error}", (0,)) from None

    def close(self) -> None:
        """Close the connection, and end the wait for an answer."""
        if (connection := self._connection) is not None:
            shut(connection)
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


_MOST_REQUEST_BYTES = 1 << 20
_MOST_KEYS = 1 << 16
_MOST_BYTES = 1 << 26
_REQUESTS = msgspec.msgpack.Decoder(Request)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def _send(connection: ssl.SSLSocket, value: Request | Answer) -> None:
    text = msgspec.msgpack.encode(value)
    if len(text) > _MOST_REQUEST_BYTES:
        raise ValueError(f"a value of {len(text)} bytes is longer than {_MOST_REQUEST_BYTES}")
    connection.sendall(len(text).to_bytes(4, "little") + text)


def _receive(connection: ssl.SSLSocket, most_bytes: int) -> bytes:
    length = int.from_bytes(receive_exactly(connection, 4), "little")
    if length > most_bytes:
        raise ValueError(f"a message of {length} bytes is longer than {most_bytes}")
    return receive_exactly(connection, length)


_BOARD = "board"
"""The purpose of a connection to replica 0's board."""
_DIRECTIONS = ("sends", "receives")
"""The two connections of a link, by how the process that dialled uses them."""


class Session:
    """All encrypted connections of this process: a `Way`.

    The first process of replica 0 listens at the address alone; process i of a replica at port + i of the
    interface that leads there, or at a free port where that one is taken.

    Args:
        meeting: the processes that meet at replica 0's board.
        secret: the secret of all, or None.
        certificates: the directory of certificates, or None.
        timeout_seconds: how long an answer of the board may take.

    Raises:
        UserError: if the secret or the certificates can't be used.
        ExchangeError: if replica 0 has another proof, or none.
    """

    def __init__(
        self,
        meeting: Meeting,
        secret: str | None,
        certificates: str | os.PathLike[str] | None,
        timeout_seconds: float,
    ) -> None:
        self.security = security_of(secret, certificates)
        """The proof."""
        self.deadline = meeting.deadline
        """The time until which all must connect, by `time.monotonic`."""
        self.address = meeting.address
        """host:port at which other processes reach this one."""
        host, port = meeting.host_and_port
        if meeting.is_host:
            board, listener = OwnBoard(), listen(host, port)[0]
        else:
            connection = meeting.reach(partial(dial, meeting.address, _BOARD, self.security))
            board, own_address = RemoteBoard(connection, timeout_seconds), connection.getsockname()[0]
            try:
                listener, _ = listen(own_address, port + meeting.rank)
            except UserError:
                listener, _ = listen(own_address, 0)
            bracketed = f"[{own_address}]" if ":" in own_address else own_address
            self.address = f"{bracketed}:{listener.getsockname()[1]}"
        self.store: Board = board
        """The board at which all processes meet."""
        self.door = Door(listener, self.security)
        """The listener through which other processes come in."""
        self.resources = ExitStack()
        """The connections, which end with the session."""
        self.resources.callback(self.door.close)
        if isinstance(board, RemoteBoard):
            self.resources.callback(board.close)
        else:
            self.door.expect(_BOARD, board.serve, once=False)
        self._end = weakref.finalize(self, self.resources.close)

    @property
    def refused(self) -> str | None:
        """The sentence for the last process with another proof."""
        return self.door.refused

    def backend(self, name: str, rank: int, size: int, *, member: str = "replica") -> "EncryptedBackend":
        """A backend of the processes that give the same name.

        Raises:
            ExchangeError: if a process does not connect in time, or can't be reached.
        """
        return EncryptedBackend(self, name, rank, size, member)

    def close(self) -> None:
        """End all connections, and stop to listen."""
        self._end()


class EncryptedBackend:
    """An encrypted link between any two processes; the higher rank of the two has dialled.

    Args:
        session: of this process; the backend keeps it alive.
        name: of the backend, which no other one has.
        rank: this process, from 0.
        size: the number of processes.
        member: the word for a process in messages.
    """

    def __init__(self, session: Session, name: str, rank: int, size: int, member: str) -> None:
        self._session, self._rank, self._size = session, rank, size
        deadline = session.deadline
        coming = {higher: _expect(session.door, f"{name}/{higher}") for higher in range(rank + 1, size)}
        if coming:
            session.store.compare_set(f"addresses/{name}/{rank}", "", session.address)
        self._links: dict[int, Link] = {}
        for other in range(size):
            if other == rank:
                continue
            try:
                if other < rank:
                    address = _address(session.store, f"addresses/{name}/{other}", deadline)
                    link = _dial(address, f"{name}/{rank}", session.security)
                else:
                    link = _come(coming[other], deadline)
            except (OSError, ValueError) as error:
                missing = (other,) if member == "replica" else ()
                raise ExchangeError(f"{member} {other} could not be connected: {error}", missing) from None
            self._links[other] = link
            session.resources.callback(link.fail, "this process closed the connection")

    def rank(self) -> int:
        """This process, from 0."""
        return self._rank

    def size(self) -> int:
        """The number of processes."""
        return self._size

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Operation:
        """Start to send one tensor."""
        (tensor,) = tensors
        return self._links[rank].send(tensor, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Operation:
        """Start to receive one tensor."""
        (tensor,) = tensors
        return self._links[rank].receive(tensor, tag)


def _expect(door: Door, purpose: str) -> "list[SimpleQueue[ssl.SSLSocket]]":
    """Accept the two connections of another process."""
    queues: list[SimpleQueue[ssl.SSLSocket]] = []
    for direction in _DIRECTIONS:
        queues.append(SimpleQueue())
        door.expect(f"{purpose}/{direction}", queues[-1].put, once=True)
    return queues


def _come(queues: "list[SimpleQueue[ssl.SSLSocket]]", deadline: float) -> Link:
    try:
        incoming, outgoing = (queue.get(timeout=max(deadline - time.monotonic(), 0.01)) for queue in queues)
    except Empty:
        raise TimeoutError("it did not come in time") from None
    return Link(outgoing, incoming)


def _address(board: Board, key: str, deadline: float) -> str:
    while not board.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come in time")
        time.sleep(0.02)
    address = board.get(key).decode()
    if not address.rpartition(":")[2].isdecimal() or len(address) > _LONGEST_ADDRESS:
        raise ValueError(f"{address[:_LONGEST_ADDRESS]} is no address")
    return address


def _dial(address: str, purpose: str, security: Security) -> Link:
    try:
        return Link(*(dial(address, f"{purpose}/{direction}", security) for direction in _DIRECTIONS))
    except OSError as error:
        raise ConnectionError(
            f"this machine can't reach {address} ({error.strerror or error}); open that port to it"
        ) from None


_LONGEST_ADDRESS = 300
