"""The gate alone: who goes ahead of whom, and what becomes of those that stop waiting."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from safe_offload.worker.gate import CHOICE_MAX, Gate, Turn

MAX_BYTES = 4

indices = st.integers(0, 2)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(1, 12)),
        st.tuples(st.just("enter"), st.integers(1, 4)),
        st.tuples(st.just("end"), indices),
        st.tuples(st.just("cancel"), indices),
        st.tuples(st.just("hurry"), indices),
        st.tuples(st.just("settle")),
    ),
    min_size=20,
    max_size=60,
)


class Run:
    """Transfers at a gate, in the order of arrival, and those that were admitted, in theirs."""

    def __init__(self) -> None:
        self.gate = Gate(MAX_BYTES)
        self.turns: dict[Turn, asyncio.Task[None]] = {}
        self.ends: dict[Turn, asyncio.Event] = {}
        self.admitted: list[Turn] = []
        self.hurried: set[Turn] = set()

    async def _transfer(self, turn: Turn) -> None:
        await self.gate.enter(turn)
        self.admitted.append(turn)
        await self.ends[turn].wait()
        self.gate.leave(turn)

    def enter(self, size_bytes: int) -> None:
        turn = Turn(size_bytes)
        self.ends[turn] = asyncio.Event()
        self.turns[turn] = asyncio.create_task(self._transfer(turn))

    def end(self, index: int) -> None:
        for turn in self.running[index : index + 1]:
            self.ends[turn].set()

    def cancel(self, index: int) -> None:
        """Stop one that waits, or that has been admitted and does not know it yet."""
        for turn in self.waiting[index : index + 1]:
            self.turns[turn].cancel()

    def hurry(self, index: int) -> None:
        for turn in self.waiting[index : index + 1]:
            self.hurried.add(turn)
            self.gate.skip_ahead(turn)

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        self.check()

    @property
    def waiting(self) -> list[Turn]:
        return [t for t in self.turns if t not in self.admitted and not self.turns[t].done()]

    @property
    def running(self) -> list[Turn]:
        return [t for t in self.admitted if not self.ends[t].is_set()]

    def check(self) -> None:
        """Check the order so far, when the transfers have done what they can."""
        in_flight = sum(turn.size_bytes for turn in self.running)
        assert not self.waiting or in_flight >= MAX_BYTES
        assert repr(self.gate) == f"<Gate: {in_flight} of 4 bytes, {len(self.waiting)} wait>"
        order = list(self.turns)
        for turn in self.waiting + self.admitted:
            num_ahead = self.admitted.index(turn) if turn in self.admitted else None
            later = set(order[order.index(turn) + 1 :]) - self.hurried
            passing = [other for other in self.admitted[:num_ahead] if other in later]
            assert sum(other.size_bytes for other in passing) <= turn.size_bytes
            assert all(other.size_bytes < turn.size_bytes for other in passing)


@given(operations=operations)
def test_no_more_bytes_pass_a_transfer_than_its_own_and_all_have_their_turn(
    operations: Any,
) -> None:
    async def play() -> None:
        run = Run()
        for name, *arguments in operations:
            if name in ("enter", "settle"):  # else what follows happens before the loop turns
                await run.settle()
            if name != "settle":
                getattr(run, name)(*arguments)
        await run.settle()
        while run.running:
            run.end(0)
            await run.settle()
        assert not run.waiting

    asyncio.run(play())


def test_the_next_is_the_smallest_of_the_oldest() -> None:
    async def play() -> None:
        run = Run()
        for size_bytes in (MAX_BYTES, *[9] * (CHOICE_MAX - 1), 3, 2):
            run.enter(size_bytes)
        await run.settle()
        run.end(0)
        await run.settle()
        assert [turn.size_bytes for turn in run.running] == [3, 2]

    asyncio.run(play())
