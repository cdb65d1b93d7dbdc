"""The processes of one replica, where the first alone meets the other replicas: it calls, and the others follow.

Shapes: n elements of one process's shards.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from diloco.errors import ExchangeError
from diloco.exchange.bounded import first_sentence
from diloco.exchange.gloo import Group, Work, wait_for


class Call(IntEnum):
    """The messages of the first process, and the answers of the others."""

    FAILED = 0
    """The sender can't go on, and the text says why."""
    IDLE = 1
    """An inner step after which nothing happens."""
    STEP = 2
    """An inner step after which calls follow until DONE."""
    FINISH = 3
    """The end of the run: calls follow until DONE."""
    DONE = 4
    """All that happens in this step has happened; the text says what."""
    THETA = 5
    """Send your shards of θ_p."""
    MERGE = 6
    """Receive your shards of θ_p after a merge."""
    GATHER = 7
    """Send your shards of what all processes pass."""
    SCATTER = 8
    """Receive your shards of what the first process passes."""
    SHARE = 9
    """The text is a JSON value for all."""
    ANSWER = 10
    """A vector follows."""


class Message(NamedTuple):
    """A call, and what it is about."""

    call: Call
    fragment: int = 0
    text: str = ""


class Inside:
    """The messages between the processes of one replica; nothing else may use their group.

    Every wait is bounded. A process that has sent a vector goes on to what the first one says next, so that it
    hears of a failure.

    Args:
        group: the processes, on gloo; the first one calls.
        timeout_seconds: how long a wait may take: longer than what the first process does between two calls.
    """

    def __init__(self, group: Group, timeout_seconds: float) -> None:
        self.group, self.index, self.size = group, group.rank(), group.size()
        self.failure: str | None = None
        """The process of this replica that has failed, and its reason."""
        self._timeout_seconds = timeout_seconds
        self._sent: list[_Posted] = []
        self._has_told = False
        self._told_by: int | None = None

    @property
    def is_first(self) -> bool:
        """True for the process that calls."""
        return self.index == 0

    def lead(self, call: Call, fragment: int = 0, text: str = "") -> None:
        """Call the other processes; only the first may."""
        assert self.is_first, "the others follow"
        posted = [(k, self._post(Message(call, fragment, text), k)) for k in range(1, self.size)]
        for follower, works in posted:
            self._wait(works, follower, self._timeout_seconds)

    def follow(self, *expected: Call) -> Message:
        """The next call of the first process.

        Raises:
            ExchangeError: if that one failed, does not answer, or does something else than is expected here.
        """
        message = self._heard(0)
        if message.call not in expected:
            raise ExchangeError(
                f"the first process of this replica is at {message.call.name}, and process {self.index} at "
                f"{' or '.join(call.name for call in expected)}: let all of them call the engine's methods in the "
                "same order, and take the same number of steps"
            )
        return message

    def together(self, call: Call, fragment: int = 0) -> None:
        """Begin what all processes do now."""
        if self.is_first:
            self.lead(call, fragment)
        else:
            message = self.follow(call)
            assert message.fragment == fragment, "all go through the fragments in order"

    def share(self, value: object = None) -> Any:
        """The first process's JSON value, in all processes."""
        if self.is_first:
            self.lead(Call.SHARE, text=json.dumps(value))
            return value
        return json.loads(self.follow(Call.SHARE).text)

    def send(self, vector_n: Tensor, to: int) -> None:
        """Send a vector on the CPU, which must not change any more, to the first process or from it to another."""
        works = [] if self.is_first else self._post(Message(Call.ANSWER), to)
        if vector_n.numel():
            works.append(self._posted(vector_n, to, _VECTOR))
        if self.is_first:
            self._wait(works, to, self._timeout_seconds)
        else:
            self._sent += works

    def receive(self, source: int, num_elements: int) -> Tensor:
        """The FP32 vector (n) that a process sends.

        Raises:
            ExchangeError: if it failed, or does not answer.
        """
        if self.is_first:
            self._heard(source)
        vector_n = torch.empty(num_elements)
        if num_elements:
            self._receive_into(vector_n, source, _VECTOR)
        return vector_n

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """A context whose errors reach the other processes."""
        try:
            yield
        except Exception as error:
            self.fail(str(error) or type(error).__name__)
            raise

    def fail(self, reason: str) -> None:
        """Tell the others that this process can't go on; waits until they know, 3 s at the most."""
        if self._has_told or self._told_by == 0:
            return
        self._has_told = True
        self.failure = self.failure or f"process {self.index} of this replica failed: {reason}"
        posted: list[tuple[int, list[_Posted]]] = []
        for other in range(1, self.size) if self.is_first else range(1):
            if other != self._told_by:
                with suppress(ExchangeError):  # it may be gone, too
                    posted.append((other, self._post(Message(Call.FAILED, text=self.failure), other)))
        deadline = time.monotonic() + _SECONDS_TO_BE_READ
        for other, works in posted:
            with suppress(ExchangeError):
                self._wait(works, other, max(deadline - time.monotonic(), 0.01))

    def _post(self, message: Message, to: int) -> "list[_Posted]":
        """Start to send a message."""
        text = torch.frombuffer(bytearray(message.text.encode()), dtype=torch.uint8) if message.text else None
        head = torch.tensor([message.call, message.fragment, 0 if text is None else text.numel()])
        works = [self._posted(head, to, _HEAD)]
        return works if text is None else [*works, self._posted(text, to, _TEXT)]

    def _posted(self, tensor: Tensor, to: int, tag: int) -> "_Posted":
        with self._naming(to):
            return self.group.send([tensor], to, tag), tensor

    def _heard(self, source: int) -> Message:
        """The next message of a process."""
        head = torch.empty(3, dtype=torch.int64)
        self._receive_into(head, source, _HEAD)
        call, fragment, num_bytes = head.tolist()
        text = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            self._receive_into(text, source, _TEXT)
        message = Message(Call(call), fragment, text.numpy().tobytes().decode())
        if message.call is Call.FAILED:
            self.failure, self._told_by = message.text, source
            raise ExchangeError(message.text)
        sent, self._sent = self._sent, []
        self._wait(sent, source, self._timeout_seconds)
        return message

    def _receive_into(self, tensor: Tensor, source: int, tag: int) -> None:
        with self._naming(source):
            wait_for(self.group.recv([tensor], source, tag), self._timeout_seconds)

    def _wait(self, works: "list[_Posted]", other: int, seconds: float) -> None:
        with self._naming(other):
            for work, _ in works:
                wait_for(work, seconds)

    @contextmanager
    def _naming(self, other: int) -> Iterator[None]:
        """Name the process that does not answer."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise ExchangeError(
                f"process {other} of this replica does not answer: {first_sentence(error)}"
            ) from error


_Posted: TypeAlias = tuple[Work, Tensor]
"""A message on its way, and its memory, which must live as long."""
_HEAD, _TEXT, _VECTOR = range(3)
"""The tags of a message's parts: none is received in the place of another."""
_SECONDS_TO_BE_READ = 3.0
