"""The order in which large objects travel, so that a slow link finishes some before it begins others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LARGE_BYTES = 1 << 16
"""Size above which an object waits for its turn."""
MOST_BYTES = 1 << 25
"""Size of all objects that travel at once; a larger one travels alone."""


class Turns:
    """The large objects on their way to a store, or from it.

    All together they would share a slow link's rate until the time of each was over, and begin again for ever.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of the objects on their way."""
        self._first = asyncio.Lock()
        self._has_room = asyncio.Event()

    def is_free(self, num_bytes: int) -> bool:
        """True if an object of this size would have its turn at once."""
        has_room = not self.num_bytes or self.num_bytes + num_bytes <= MOST_BYTES
        return num_bytes <= LARGE_BYTES or (has_room and not self._first.locked())

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[int]:
        """A context in which an object travels; in the order of the calls, and at once for a small one.

        Its value is the number of bytes for which it needs time: all that travel, or a small object's own.
        """
        if num_bytes <= LARGE_BYTES:
            yield num_bytes
            return
        async with self._first:
            while self.num_bytes and self.num_bytes + num_bytes > MOST_BYTES:
                self._has_room.clear()
                await self._has_room.wait()
            self.num_bytes += num_bytes
        try:
            yield self.num_bytes
        finally:
            self.num_bytes -= num_bytes
            self._has_room.set()
