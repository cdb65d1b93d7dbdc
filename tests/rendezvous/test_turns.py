"""Turns on a slow link."""

import asyncio

import pytest

from diloco.rendezvous.store import LARGE_BYTES, MOST_BYTES_AT_ONCE, Turns


def test_turns_are_taken_in_order_and_never_for_more_than_the_most():
    async def use() -> list[int]:
        turns, begun, sizes = (
            Turns(),
            [],
            [MOST_BYTES_AT_ONCE // 2, MOST_BYTES_AT_ONCE // 2, 2 * MOST_BYTES_AT_ONCE, LARGE_BYTES + 1],
        )

        async def travel(number: int, size: int) -> None:
            async with turns.turn(size):
                begun.append(number)
                assert turns.num_bytes <= max(MOST_BYTES_AT_ONCE, size)
                await asyncio.sleep(0.005)

        await asyncio.gather(*(travel(number, size) for number, size in enumerate(sizes)))
        assert turns.num_bytes == 0
        return begun

    assert asyncio.run(use()) == [0, 1, 2, 3], "a small one does not pass a large one that waits"


def test_a_turn_that_was_cancelled_or_has_failed_is_the_next_ones():
    async def use() -> None:
        turns = Turns()

        async def travel() -> None:
            async with turns.turn(MOST_BYTES_AT_ONCE):
                await asyncio.sleep(1e6)

        first = asyncio.create_task(travel())
        waiting = asyncio.create_task(travel())
        await asyncio.sleep(0.01)
        waiting.cancel()
        first.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        with pytest.raises(OSError, match="lost"):
            async with turns.turn(MOST_BYTES_AT_ONCE):
                raise OSError("lost")
        async with asyncio.timeout(5), turns.turn(MOST_BYTES_AT_ONCE):
            assert turns.num_bytes == MOST_BYTES_AT_ONCE

    asyncio.run(use())
