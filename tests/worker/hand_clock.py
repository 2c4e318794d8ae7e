"""An event loop whose clock the test sets, so that no deadline is ever waited for."""

from __future__ import annotations

import asyncio

from safe_offload.worker.engine import TransferEngine
from tests.worker.fake_backend import flush


class HandClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """A loop that goes by this clock."""
        clock = self

        class Loop(asyncio.SelectorEventLoop):
            def time(self) -> float:
                return clock._now_s

        return Loop()

    def advance(self, engine: TransferEngine, seconds: float) -> None:
        """Let time pass between two turns of the engine's loop, and what is due then happen."""
        flush(engine)
        assert engine._loop is not None
        engine._loop.call_soon_threadsafe(self._pass, seconds)
        flush(engine)

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds
