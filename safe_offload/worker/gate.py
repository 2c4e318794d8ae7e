"""The queue of the transfers of one direction, which bounds the bytes in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from typing import Final

CHOICE_MAX: Final = 64
"""Maximum of the transfers, the oldest that wait, among which the next is chosen."""


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of one transfer. Only its gate changes it, on the loop's thread.

    Attributes:
        passed_bytes: the bytes that came after it and went ahead of it.
        is_urgent: a hook waits for it.
        is_counted: it is in flight.
    """

    size_bytes: int
    passed_bytes: int = 0
    is_urgent: bool = False
    is_counted: bool = False


class Gate:
    """Admits transfers while the bytes in flight are below a bound, small ones first.

    So the next copy is issued while the last one runs, unless that is larger than the bound. The
    smaller ones that pass a transfer have no more bytes than it has: none starves.
    """

    def __init__(self, max_inflight_bytes: int) -> None:
        self._max_bytes = max_inflight_bytes
        # Both change on the loop's thread only. None waits while the bytes are below the bound.
        self._bytes = 0
        self._waiting: dict[Turn, asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        return f"<Gate: {self._bytes} of {self._max_bytes} bytes, {len(self._waiting)} wait>"

    async def enter(self, turn: Turn) -> None:
        """Wait for a turn."""
        assert not turn.is_counted
        if turn.is_urgent or self._bytes < self._max_bytes:
            self._count(turn)
            return
        self._waiting[turn] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[turn]
        except asyncio.CancelledError:
            self.leave(turn)
            raise

    def leave(self, turn: Turn) -> None:
        """Subtract the turn's bytes, if they are in flight; idempotent."""
        self._waiting.pop(turn, None)
        if turn.is_counted:
            turn.is_counted = False
            self._bytes -= turn.size_bytes
            assert self._bytes >= 0
        while self._waiting and self._bytes < self._max_bytes:
            self._admit(self._choose())

    def skip_ahead(self, turn: Turn) -> None:
        """Admit a transfer now, whatever is in flight."""
        turn.is_urgent = True
        if turn in self._waiting:
            self._admit(turn)

    def cancel_waiting(self) -> None:
        """Cancel all waiting transfers."""
        for granted in self._waiting.values():
            granted.cancel()

    def _choose(self) -> Turn:
        """Return the smallest transfer that may pass all before it, which it then has passed."""
        turns = islice(self._waiting, CHOICE_MAX)
        smallest = next(turns)
        spare_bytes = smallest.size_bytes - smallest.passed_bytes
        for turn in turns:
            if turn.size_bytes < smallest.size_bytes and turn.size_bytes <= spare_bytes:
                smallest = turn
            spare_bytes = min(spare_bytes, turn.size_bytes - turn.passed_bytes)
        for turn in self._waiting:
            if turn is smallest:
                break
            turn.passed_bytes += smallest.size_bytes
        return smallest

    def _admit(self, turn: Turn) -> None:
        granted = self._waiting.pop(turn)
        self._count(turn)
        if not granted.done():  # else its wait was cancelled, and `leave` comes next
            granted.set_result(None)

    def _count(self, turn: Turn) -> None:
        turn.is_counted = True
        self._bytes += turn.size_bytes
