"""What the batches of all tiers have in common; the contract of tiers tests the rest."""

from __future__ import annotations

import asyncio

from safe_offload.tiers import batch
from safe_offload.tiers.batch import BadNames, Calls
from tests.tiers.contract import name_of


async def test_closing_gives_up_each_call_and_returns_after_it():
    calls, loop = Calls(), asyncio.get_running_loop()
    workers = [loop.create_future() for _ in range(3)]
    given_up: list[int] = []
    for number, worker in enumerate(workers):
        waiting = calls.outlast([worker], lambda number=number: given_up.append(number))
        loop.create_task(waiting)
    await asyncio.sleep(0)
    workers[1].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(calls.close())
    await asyncio.sleep(0)
    assert calls.is_closed
    assert given_up == [0, 2]
    workers[0].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    workers[2].cancel()
    await closing
    await calls.close()


def test_bad_names_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(batch, "_BAD_NAMES_MAX", 2)
    names = BadNames()
    for number in range(3):
        names.add(name_of(number))
    assert names == {name_of(2)}
