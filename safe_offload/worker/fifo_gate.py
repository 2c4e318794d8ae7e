"""The queue of the transfers of one direction, which bounds the bytes in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of one transfer, urgent if a hook waits for it, and counted while in flight.

    Only its gate changes it, on the loop's thread. `granted` is done at its turn.
    """

    size_bytes: int
    granted: asyncio.Future[None] | None = None
    is_urgent: bool = False
    is_counted: bool = False


class FifoGate:
    """Admits transfers in order while their bytes are within bounds, and always at least one."""

    def __init__(self, max_inflight_bytes: int) -> None:
        self._max_bytes = max_inflight_bytes
        # Both change on the loop's thread only.
        self._bytes = 0
        self._waiting: deque[Turn] = deque()

    def __repr__(self) -> str:
        return f"<FifoGate: {self._bytes} of {self._max_bytes} bytes, {len(self._waiting)} wait>"

    async def enter(self, turn: Turn) -> None:
        """Wait for a turn."""
        assert turn.granted is None
        assert not turn.is_counted
        if turn.is_urgent or (self._fits(turn) and not self._waiting):
            self._count(turn)
            return
        turn.granted = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn.granted
        except asyncio.CancelledError:
            self.leave(turn)
            raise

    def leave(self, turn: Turn) -> None:
        """Subtract the turn's bytes, if they are in flight; idempotent."""
        if turn.is_counted:
            turn.is_counted = False
            self._bytes -= turn.size_bytes
            assert self._bytes >= 0
        self._let_in()

    def skip_ahead(self, turn: Turn) -> None:
        """Admit a transfer now, whatever is in flight."""
        turn.is_urgent = True
        if turn.granted is not None and not turn.granted.done():
            self._grant(turn, turn.granted)

    def cancel_waiting(self) -> None:
        """Cancel all waiting transfers."""
        for turn in list(self._waiting):
            if turn.granted is not None and not turn.granted.done():
                turn.granted.cancel()

    def _grant(self, turn: Turn, granted: asyncio.Future[None]) -> None:
        self._count(turn)
        granted.set_result(None)

    def _count(self, turn: Turn) -> None:
        turn.is_counted = True
        self._bytes += turn.size_bytes

    def _fits(self, turn: Turn) -> bool:
        return not self._bytes or self._bytes + turn.size_bytes <= self._max_bytes

    def _let_in(self) -> None:
        while self._waiting:
            turn = self._waiting[0]
            assert turn.granted is not None
            if not turn.granted.done():
                if not self._fits(turn):
                    return
                self._grant(turn, turn.granted)
            self._waiting.popleft()
