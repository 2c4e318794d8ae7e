"""Waiting that outlasts a cancellation."""

import asyncio

import pytest

from safe_offload.tiers.waiting import outlast


@pytest.mark.parametrize("num_cancels", [0, 1, 3])
async def test_what_has_begun_is_waited_for_however_often_the_one_that_waits_is_cancelled(
    num_cancels,
):
    loop = asyncio.get_running_loop()
    futures, given_up = [loop.create_future(), loop.create_future()], []
    waiting = asyncio.create_task(outlast(futures, lambda: given_up.append(None)))
    await asyncio.sleep(0)
    futures[0].set_result(None)
    for _ in range(num_cancels):
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(given_up) == num_cancels
    assert not waiting.done()
    futures[1].cancel()
    assert await waiting


async def test_what_has_ended_is_not_waited_for():
    assert await outlast([], lambda: None)
    assert await outlast([], lambda: None, until_s=0.0)


async def test_what_has_not_ended_in_time_goes_on():
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    assert not await outlast([future], future.cancel, until_s=loop.time() + 0.001)
    assert not await outlast([future], future.cancel, until_s=0.0)
    assert not future.cancelled()


async def test_what_was_just_cancelled_has_a_turn_to_end_however_late_it_is():
    """The loop may have stood still from before the deadline until after the grace."""
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    assert await outlast({task}, task.cancel, until_s=0.0)
