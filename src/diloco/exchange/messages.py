"""Point-to-point messages of torch.distributed in flight, and the errors that they met."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from diloco.errors import ExchangeError
from diloco.exchange.bounded import first_sentence, within
from diloco.exchange.notices import Notices
from diloco.exchange.transport import Channel, Tag


class Answers:
    """The other replicas' answers, as the waits of one exchange have met them."""

    def __init__(self) -> None:
        self.heard_at: dict[int, float] = {}
        """Time at which a message from each replica was last taken, by `time.monotonic()`."""
        self.lateness_seconds: dict[int, float] = {}
        """Duration of the last wait for a payload of each replica, after those of the replicas before it."""


class Messages:
    """The messages of one exchange.

    Args:
        payloads: what is sent, by replica; a message of the same length is received from each.
        device: where the messages lie.
        tag: the exchange that errors name.
        timeout_seconds: how long `wait` waits at the most.
        notices: they end a wait that is in vain.
        answers: the record of when each replica answered.
        in_replica: the messages go between the processes of this replica, which then take the place of replicas.
    """

    def __init__(
        self,
        payloads: Mapping[int, Tensor],
        device: torch.device,
        tag: Tag,
        timeout_seconds: float,
        notices: Notices,
        answers: Answers,
        *,
        in_replica: bool = False,
    ) -> None:
        self.tag = tag
        """The exchange."""
        self.interruption: str | None = None
        """The reason why the wait is in vain."""
        self._timeout_seconds = timeout_seconds
        self._notices = notices
        self._answers = answers
        self._in_replica = in_replica
        self._waits: list[tuple[int, Callable[[float], None]]] = []
        self._missing: dict[int, str] = {}
        # Kept alive: the transport reads from them until all is sent.
        self.outgoing = {replica: payload.to(device) for replica, payload in sorted(payloads.items())}
        """The messages sent, by replica."""
        self.incoming = {
            replica: torch.empty_like(payload, pin_memory=payload.is_pinned())
            for replica, payload in self.outgoing.items()
        }
        """Memory for the messages received, by replica; pinned if that of the sent ones is, which a GPU made."""

    def add(self, replica: int, wait: Callable[[float], None]) -> None:
        """Add a message from or to a replica; `wait(seconds)` returns when it is over, or raises."""
        self._waits.append((replica, wait))

    @contextmanager
    def blaming(self, replica: int) -> Iterator[None]:
        """Note an error as this replica's, and go on with the others."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self._missing.setdefault(replica, first_sentence(error))

    def wait(self) -> dict[int, Tensor]:
        """The messages received, once every message has come in and gone out.

        Raises:
            ExchangeError: naming the exchange and the replicas that are missing.
        """
        deadline = time.monotonic() + self._timeout_seconds
        lateness_seconds: dict[int, float] = {}
        with self._notices.watching(self):
            while self._waits:
                replica, wait = self._waits[0]
                start = time.monotonic()
                with self.blaming(replica):
                    # After one timeout the others have a moment left, to learn who else is missing.
                    wait(0.01 if self.interruption else max(deadline - start, 0.01))
                    now = time.monotonic()
                    lateness_seconds[replica] = lateness_seconds.get(replica, 0.0) + now - start
                    self._answers.heard_at = {**self._answers.heard_at, replica: now}
                del self._waits[0]
        if self._missing:
            raise self._error()
        if self.tag.channel is Channel.PAYLOAD:
            self._answers.lateness_seconds = lateness_seconds
        return self.incoming

    def interrupt(self, reason: str) -> None:
        """End the wait: a connection closes, on gloo all do, when a wait on it runs out of time."""
        self.interruption = self.interruption or reason
        for _, wait in self._waits[:1]:
            with suppress(RuntimeError, TimeoutError):
                wait(0.001)

    def _error(self) -> ExchangeError:
        """The error of messages that did not come, with its cause where a replica has posted it."""
        missing = () if self._in_replica else tuple(sorted(self._missing))
        deadline = time.monotonic() + _SECONDS_FOR_THE_CAUSE
        while self.interruption is None and self._notices.failure is None and time.monotonic() < deadline:
            with suppress(TimeoutError):  # the store's process stands still
                within(deadline - time.monotonic(), self._notices.look)
            time.sleep(0.05)  # whoever fails closes its connections a moment before it says why
        if (cause := self.interruption or self._notices.failure) is not None:
            return ExchangeError(f"{self.tag}: {cause}", missing)
        member = "process {} of this replica" if self._in_replica else "replica {}"
        names = ", ".join(f"{member.format(i)} ({self._missing[i]})" for i in sorted(self._missing))
        return ExchangeError(f"{self.tag}: no payload from or to {names}", missing)


_SECONDS_FOR_THE_CAUSE = 1.0
