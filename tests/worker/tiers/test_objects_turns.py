"""Who uses a connection first."""

from __future__ import annotations

import asyncio
import random

from safe_offload.worker.tiers.objects.turns import Rank, Turns


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Course:
    """Calls of some objects each, which are done when the test says so."""

    def __init__(self, number: int) -> None:
        self.turns = Turns(number)
        self.at_work: list[str] = []
        self._goes_on = asyncio.Condition()
        self._num_allowed = 0
        self.done: list[str] = []

    def begin(
        self, name: str, rank: Rank, num_objects: int, num_workers: int
    ) -> asyncio.Task[None]:
        left = list(range(num_objects))

        async def work() -> None:
            while left:
                await self.turns.take(rank)
                try:
                    while left:
                        left.pop()
                        await self._do(name)
                        if self.turns.is_wanted(rank):
                            break
                finally:
                    self.turns.give(rank)

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_workers):
                    group.create_task(work())

        return asyncio.ensure_future(run())

    async def _do(self, name: str) -> None:
        self.at_work.append(name)
        try:
            async with self._goes_on:
                await self._goes_on.wait_for(lambda: self._num_allowed > 0)
                self._num_allowed -= 1
            self.done.append(name)
        finally:
            self.at_work.remove(name)

    def hold(self) -> None:
        """Let no more objects be done than was said from now on."""
        self._num_allowed = 0

    async def let_through(self, number: int) -> None:
        """Let so many objects be done, whichever they are."""
        await settle()
        for _ in range(number):
            async with self._goes_on:
                self._num_allowed += 1
                self._goes_on.notify()
            await settle()


async def test_a_fetch_goes_before_one_that_came_later() -> None:
    course = Course(4)
    first = course.begin("first", Rank(False, 1), 20, 4)
    second = course.begin("second", Rank(False, 2), 20, 4)
    await course.let_through(17)
    assert course.done == ["first"] * 17
    await course.let_through(23)
    await asyncio.gather(first, second)
    assert course.done[-18:] == ["second"] * 18


async def test_a_fetch_takes_turns_from_a_spill_but_for_a_share() -> None:
    course = Course(8)
    spill = course.begin("spill", Rank(True, 1), 40, 8)
    await course.let_through(2)
    assert course.at_work == ["spill"] * 8
    fetch = course.begin("fetch", Rank(False, 2), 40, 8)
    await course.let_through(30)
    assert sorted(course.at_work) == ["fetch"] * 6 + ["spill"] * 2
    await course.let_through(80)
    await asyncio.gather(spill, fetch)
    assert course.done.count("fetch") == course.done.count("spill") == 40


async def test_a_spill_gets_its_share_from_a_fetch_that_was_there_before() -> None:
    course = Course(4)
    fetch = course.begin("fetch", Rank(False, 1), 40, 8)
    spill = course.begin("spill", Rank(True, 2), 10, 4)
    await course.let_through(8)
    assert sorted(course.at_work) == ["fetch"] * 3 + ["spill"]
    await course.let_through(42)
    await asyncio.gather(spill, fetch)


async def test_no_turn_is_lost_or_had_twice_however_calls_are_cancelled() -> None:
    rng = random.Random(3)
    for _ in range(100):
        number = rng.randrange(1, 6)
        course = Course(number)
        calls = [
            course.begin(str(index), Rank(rng.random() < 0.4, index), rng.randrange(9), 3)
            for index in range(6)
        ]
        for _ in range(30):
            if rng.random() < 0.2:
                rng.choice(calls).cancel()
            await course.let_through(rng.randrange(3))
            assert len(course.at_work) <= number
        await course.let_through(60)
        await asyncio.gather(*calls, return_exceptions=True)
        course.hold()
        again = course.begin("again", Rank(False, 9), number, number)
        await settle()
        assert course.at_work == ["again"] * number, "all turns are there"
        await course.let_through(number)
        await again


async def test_a_turn_that_comes_when_its_call_is_cancelled_goes_to_the_next() -> None:
    turns, rank = Turns(1), Rank(True, 1)
    await turns.take(rank)
    waiting = asyncio.ensure_future(turns.take(rank))
    await settle()
    turns.give(rank)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await asyncio.wait_for(turns.take(Rank(False, 2)), 10)
