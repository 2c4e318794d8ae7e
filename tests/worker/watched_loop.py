"""The product's loop on its thread, which the test can look at, kill and stop.

Every wait in here ends in an error after `PATIENCE_S`, so that a test that would hang says why.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from safe_offload.event_loop import MakeEventLoop, new_event_loop
from safe_offload.worker.loop_thread import LoopThread, Main
from tests.worker.waiting import PATIENCE_S


class HandClock:
    """Seconds that pass when the test says so, for timers of an event loop."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop that goes by this clock."""
        clock = self

        class EventLoop(asyncio.SelectorEventLoop):
            def time(self) -> float:
                return clock.seconds

        return EventLoop()

    def advance(self, loop: WatchedLoop, seconds: float) -> None:
        """Let time pass between two turns of the loop, and what is due then happen."""
        loop.flush()
        loop.call(self._pass, seconds)
        loop.flush()

    def _pass(self, seconds: float) -> None:
        self.seconds += seconds


class WatchedLoop:
    """See `Loop`."""

    def __init__(self, make_event_loop: MakeEventLoop = new_event_loop) -> None:
        self._make_event_loop = make_event_loop
        self._thread = LoopThread(self._make)
        self._has_ended = threading.Event()
        # None before `start`, and if it cannot be made.
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.now_s = self._thread.now_s  # what fences go by
        self.call = self._thread.call
        self.wait = self._thread.wait
        self.news = self._thread.news

    def start(self, main: Main, on_end: Callable[[], None]) -> None:

        async def watched() -> None:
            self._main_task = asyncio.current_task()
            await main()

        def end() -> None:
            on_end()
            self._has_ended.set()

        self._thread.start(watched, end)

    def join(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the thread has ended."""
        assert self._has_ended.wait(timeout_s)
        self._thread.join(timeout_s)

    def flush(self) -> None:
        """Wait until the loop has done what it can do without another copy ending.

        From an end of a copy to the issue of the next there are fewer turns of the loop than are
        waited for here. A loop that has ended has nothing left to do. One that is about to close
        may take a call and never run it.
        """
        assert self.event_loop is not None
        for _ in range(12):
            turned = threading.Event()
            try:
                self.event_loop.call_soon_threadsafe(turned.set)
            except RuntimeError:
                return
            while not turned.wait(0.05):
                if self.event_loop.is_closed():
                    return

    def kill(self) -> None:
        """Make the coroutine that the loop runs raise."""
        assert self._main_task is not None
        self.call(self._main_task.cancel)

    def stop(self) -> None:
        """Make the loop stop under its main coroutine."""
        assert self.event_loop is not None
        self.call(self.event_loop.stop)

    def _make(self) -> asyncio.AbstractEventLoop:
        self.event_loop = self._make_event_loop()
        return self.event_loop
