"""What the batches of all tiers have in common; the contract of tiers tests the rest."""

import asyncio
from functools import partial

from safe_offload.tiers import batch
from safe_offload.tiers.batch import BadNames, Calls
from tests.tiers.contract import name_of


async def test_closing_gives_up_each_call_and_returns_after_it():
    calls, loop = Calls(), asyncio.get_running_loop()
    workers = [loop.create_future() for _ in range(3)]
    waiting = [
        asyncio.ensure_future(calls.outlast([worker], partial(worker.set_result, number)))
        for number, worker in enumerate(workers)
    ]
    await asyncio.sleep(0)
    workers[1].set_result("ended by itself")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [each.done() for each in waiting] == [False, True, False]
    closing = asyncio.ensure_future(calls.close())
    try:
        await asyncio.sleep(0)
        assert calls.is_closed
        assert [worker.result() for worker in workers] == [0, "ended by itself", 2]
        await closing
        assert all(each.done() for each in waiting)
        await calls.close()
    finally:
        for worker in workers:
            worker.cancel()


async def test_closing_waits_for_what_does_not_end_at_once():
    calls, worker = Calls(), asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(calls.outlast([worker], lambda: None))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(calls.close())
    try:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
    finally:
        worker.cancel()
    await closing
    assert waiting.done()


def test_bad_names_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(batch, "_BAD_NAMES_MAX", 2)
    names = BadNames()
    for number in range(3):
        names.add(name_of(number))
    assert names == {name_of(2)}
