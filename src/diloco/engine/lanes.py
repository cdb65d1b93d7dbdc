"""Lanes: places for work that training does not wait for.

Threads wait for the network, and for a GPU. On a GPU, whose work runs in the order of a stream, outer gradients
are encoded, copied, decoded and merged on a stream beside that of training.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from diloco.wire.kernels.memory import has_streams, mark, pinned_copy

T = TypeVar("T")


Start: TypeAlias = Callable[[Callable[[], Any]], "Future[Any]"]
"""A way to do work of the host: it starts the work, and returns the future of its result."""


def here(work: Callable[[], T]) -> "Future[T]":
    """Do the work in the training thread, and raise there.

    >>> here(lambda: 1 + 1).result()
    2
    """
    result: Future[T] = Future()
    result.set_result(work())
    return result


class QueueLane:
    """One daemon thread, which does the pieces of work in the order in which they were started.

    >>> QueueLane().start(lambda: 1 + 1).result()
    2
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, work: Callable[[], T]) -> "Future[T]":
        """Queue the work for the thread."""
        if self._thread is None:
            self._thread = Thread(target=_fulfil_all, args=(self._queue,), name="diloco lane", daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._queue.put((result, work))
        return result


def _fulfil_all(queue: "SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
    while True:
        _fulfil(*queue.get())


def _fulfil(result: "Future[T]", work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # raised again where the training loop waits
        result.set_exception(error)


class DeviceLane:
    """The place for work on the device of the parameters: training's own queue, which a CPU does at once."""

    is_apart = False
    """True if the work is done later than it is queued, and the host must wait before it reads results."""

    def queue(self, work: Callable[[], T], *, after_training: bool = True) -> T:
        """Call a function that queues work; its result's tensors may be written later.

        Args:
            work: called now; its work begins after what was queued here earlier.
            after_training: begin after what training has queued so far, too.
        """
        return work()

    def join(self) -> None:
        """Let what training queues from now on begin after what was queued here."""

    def mark(self) -> Callable[[], None]:
        """A function by which any thread of the host waits for what was queued here so far."""
        return lambda: None  # reading a result waits by itself

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor where the host can read it after a wait; called in queued work."""
        return tensor


class WaitingLane(DeviceLane):
    """A GPU without streams, such as Apple's: training waits for the copies to the host."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory."""
        return tensor.cpu()


class StreamLane(DeviceLane):
    """A stream beside that of training, on a GPU."""

    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def queue(self, work: Callable[[], T], *, after_training: bool = True) -> T:
        """Call the function with the stream as the current one."""
        if after_training:
            self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            return work()

    def join(self) -> None:
        """Let the current stream wait."""
        self._module.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """The wait for an event of the stream."""
        return mark(self._device, self._stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory."""
        return pinned_copy(tensor)


def device_lane(device: torch.device, sent_from: torch.device) -> DeviceLane:
    """The lane of a device, and of the memory that payloads are sent from.

    Payloads that are sent from a GPU's own memory are sent in order, by the training loop: it waits for them.
    """
    if device.type == "cpu" or sent_from.type != "cpu":
        return DeviceLane()
    return StreamLane(device) if has_streams(device) else WaitingLane()
