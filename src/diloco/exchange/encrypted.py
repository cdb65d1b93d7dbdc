"""Groups whose messages travel encrypted, between processes that prove that they belong to the run."""

import socket
import ssl
import time
import weakref
from contextlib import ExitStack
from queue import Empty, SimpleQueue

from torch import Tensor

from diloco.errors import ExchangeError
from diloco.exchange.board import Board, BoardView, RemoteBoard
from diloco.exchange.door import Door
from diloco.exchange.link import Link, Operation
from diloco.exchange.tls import Security, dial

BOARD = "board"
"""The purpose of a connection to replica 0's board."""

# The two connections of a link, by how the process that dialled uses them.
_SENDS, _RECEIVES = "sends", "receives"


class Session:
    """All encrypted connections of this process.

    Args:
        security: the proof.
        listener: where other processes connect.
        address: host:port at which they reach it.
        board: the connection to replica 0's board; None in the process that holds it.
        timeout_seconds: how long replica 0 may take to answer.
    """

    def __init__(
        self,
        security: Security,
        listener: socket.socket,
        address: str,
        board: ssl.SSLSocket | None,
        *,
        timeout_seconds: float,
    ) -> None:
        self.security, self.address = security, address
        self.door = Door(listener, security)
        """The listener through which other processes come in."""
        self.resources = ExitStack()
        """The connections, which end with the session."""
        self.resources.callback(self.door.close)
        if board is None:
            held = Board()
            self.door.expect(BOARD, held.serve, once=False)
            self.store = BoardView(held.apply)
        else:
            remote = RemoteBoard(board, timeout_seconds)
            self.resources.callback(remote.close)
            self.store = BoardView(remote.ask)
        """The board at which all processes meet."""
        self._end = weakref.finalize(self, self.resources.close)

    def close(self) -> None:
        """End all connections, and stop to listen."""
        self._end()


class EncryptedGroup:
    """A group of processes with an encrypted link between any two; the higher rank of the two has dialled.

    Args:
        session: of this process.
        name: of the group, which no other one has.
        rank: this process, from 0.
        size: the number of processes.
        deadline: by `time.monotonic`, for all to connect.
        member: the word for a process in messages.

    Raises:
        ExchangeError: if a process does not connect in time, or can't be reached.
    """

    def __init__(
        self, session: Session, name: str, rank: int, size: int, deadline: float, *, member: str = "replica"
    ) -> None:
        self._session, self._rank, self._size = session, rank, size
        coming = {higher: _expect(session.door, f"{name}/{higher}") for higher in range(rank + 1, size)}
        addresses = session.store.below("addresses")
        if coming:
            addresses.set(f"{name}/{rank}", session.address)
        self._links: dict[int, Link] = {}
        for other in range(size):
            if other == rank:
                continue
            try:
                if other < rank:
                    address = _address(addresses, f"{name}/{other}", deadline)
                    link = _dial(address, f"{name}/{rank}", session.security)
                else:
                    link = _come(coming[other], deadline)
            except (OSError, ValueError, TimeoutError) as error:
                raise ExchangeError(f"{member} {other} could not be connected: {error}", (other,)) from None
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


_Arrivals = dict[str, "SimpleQueue[ssl.SSLSocket]"]


def _expect(door: Door, purpose: str) -> _Arrivals:
    """Let the two connections of a process come in."""
    arrivals: _Arrivals = {way: SimpleQueue() for way in (_SENDS, _RECEIVES)}
    for way, queue in arrivals.items():
        door.expect(f"{purpose}/{way}", queue.put, once=True)
    return arrivals


def _come(arrivals: _Arrivals, deadline: float) -> Link:
    try:
        there, back = (
            arrivals[way].get(timeout=max(deadline - time.monotonic(), 0.01)) for way in (_SENDS, _RECEIVES)
        )
    except Empty:
        raise TimeoutError("it did not come in time") from None
    return Link(outgoing=back, incoming=there)


def _address(addresses: BoardView, name: str, deadline: float) -> str:
    while not addresses.check([name]):
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come in time")
        time.sleep(0.02)
    address = addresses.get(name).decode()
    if not address.rpartition(":")[2].isdecimal() or len(address) > _LONGEST_ADDRESS:
        raise ValueError(f"{address[:_LONGEST_ADDRESS]} is no address")
    return address


def _dial(address: str, purpose: str, security: Security) -> Link:
    try:
        there, back = (dial(address, f"{purpose}/{way}", security) for way in (_SENDS, _RECEIVES))
    except OSError as error:
        raise ConnectionError(
            f"this machine can't reach {address} ({error.strerror or error}); open that port to it"
        ) from None
    return Link(outgoing=there, incoming=back)


_LONGEST_ADDRESS = 300
