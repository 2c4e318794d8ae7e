"""An asyncio event loop on a virtual clock, run step by step.

It is asyncio's own loop without a selector: nothing is ever waited for, time passes when the
simulator says so, and callbacks run in the order in which they became ready.
"""

import asyncio
from typing import Any


class Clock:
    """Virtual seconds, shared by all loops of a run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class _NothingToWaitFor:
    """Stands where asyncio's loop has its selector."""

    def select(self, timeout_s: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that `run_once` drives. `clock`: what the loop's timers go by."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._selector = _NothingToWaitFor()

    def time(self) -> float:
        return self._clock.now_s

    def run_once(self) -> None:
        """Run the callbacks that are ready now, and none that they add."""
        self.call_soon(self.stop)
        self.run_forever()

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        """Nothing waits in a selector that would have to be woken."""
