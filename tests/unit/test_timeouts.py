"""Deadlines that count only the time in which the loop is on time."""

import asyncio

import pytest

from stampede_guard.stores._timeouts import StallTolerantTimeout

DURATION = 0.1


def stall(seconds: float) -> None:
    """Keep the loop busy."""
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds
    while loop.time() < due:
        pass


async def test_an_answer_during_a_stall_is_read() -> None:
    """An answer that comes while the loop is stalled beyond the deadline is read all the same."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def be_late() -> None:
        stall(3 * DURATION)
        loop.call_soon(loop.call_soon, answer.set_result, "soup")  # read in one iteration, and woken in another

    loop.call_soon(be_late)
    async with StallTolerantTimeout(DURATION):
        found = await answer

    assert "soup" == found


async def test_a_loop_that_is_always_late_does_not_wait_for_ever() -> None:
    """After sixteen late steps, late ones count too."""
    loop = asyncio.get_running_loop()
    stalls = 0

    def be_late() -> None:
        nonlocal stalls
        stalls += 1
        stall(0.01)
        again[0] = loop.call_soon(be_late)

    again = [loop.call_soon(be_late)]
    with pytest.raises(TimeoutError):
        async with StallTolerantTimeout(0.02):
            await loop.create_future()
    again[0].cancel()

    assert stalls >= 24


async def test_without_an_answer_it_ends() -> None:
    """A block without an answer ends in a `TimeoutError`."""
    with pytest.raises(TimeoutError):
        async with StallTolerantTimeout(0.01):
            await asyncio.get_running_loop().create_future()


async def test_a_restart_replaces_the_deadline() -> None:
    """What was allowed before the restart does not count."""

    async def wait() -> None:
        async with StallTolerantTimeout(3600) as patience:
            patience.restart(0.01)
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await wait()


async def test_a_block_that_ends_leaves_no_timer() -> None:
    """An answer in time ends the block, and nothing of it is left in the loop."""
    async with StallTolerantTimeout(3600) as patience:
        pass

    assert patience._timer is not None
    assert patience._timer.cancelled()
