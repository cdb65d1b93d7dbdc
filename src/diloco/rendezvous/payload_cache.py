"""Payloads that wait to be counted: in memory up to a size, then in files; the least recently used leave first."""

import logging
import tempfile
import threading
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

_LOG = logging.getLogger("diloco")
DISK_OVER_MEMORY = 16
"""Largest size of the payloads in files, as a multiple of the memory."""


class PayloadCache:
    """Payloads by name. Those that it gives up can be downloaded again.

    Args:
        memory_bytes: size of the payloads in memory. As much as 16 times more lies in files without a name in the
            temporary directory, mapped into memory, which the system reads when they are used.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes, self._disk_bytes = memory_bytes, DISK_OVER_MEMORY * memory_bytes
        self._memory: OrderedDict[str, Tensor] = OrderedDict()
        self._disk: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, name: str, payload: Tensor) -> None:
        """Keep a payload, a flat uint8 tensor; called by one thread at a time, since it may write files."""
        with self._lock:
            self._memory[name] = payload
        while _bytes(self._memory) > self._memory_bytes:
            with self._lock:
                oldest = next(iter(self._memory), None)
                moved = None if oldest is None else self._memory[oldest]
            if oldest is None or moved is None:
                return
            mapped = self._written(moved) if moved.numel() <= self._disk_bytes else None
            with self._lock:
                if self._memory.pop(oldest, None) is not None and mapped is not None:
                    self._disk[oldest] = mapped
                while _bytes(self._disk) > self._disk_bytes:
                    self._disk.popitem(last=False)

    def get(self, name: str) -> Tensor | None:
        """A payload; None if it is not here any more."""
        with self._lock:
            for place in (self._memory, self._disk):
                if name in place:
                    place.move_to_end(name)
                    return place[name]
        return None

    def drop(self, name: str) -> None:
        """Forget a payload; absent ones are fine."""
        with self._lock:
            self._memory.pop(name, None)
            self._disk.pop(name, None)

    @staticmethod
    def _written(payload: Tensor) -> Tensor | None:
        """The payload in a file that disappears with the tensor; None if there is no space for it."""
        try:
            with tempfile.TemporaryFile(prefix="diloco-payload-") as file:
                file.write(payload.numpy().data)
                file.flush()
                return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(payload.numel(),)))
        except OSError as error:
            _LOG.warning(
                "a payload can't be kept in %s, and will be downloaded again: %s", tempfile.gettempdir(), error
            )
            return None


def _bytes(payloads: OrderedDict[str, Tensor]) -> int:
    return sum(payload.numel() for payload in list(payloads.values()))
