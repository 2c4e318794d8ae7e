"""The event loop of the transfers, on its own thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from safe_offload.event_loop import MakeEventLoop, new_event_loop

logger = logging.getLogger(f"vllm.{__name__}")

Main = Callable[[], Coroutine[Any, Any, None]]


class Loop(Protocol):
    """An event loop, its clock, and a way to wait for it. vLLM's thread calls the methods.

    It sets `news` when there are settled transfers to drain.
    """

    news: threading.Event

    def start(self, main: Main, on_end: Callable[[], None]) -> None:
        """Start `main`, returning once it first waits. `on_end` is called when the loop ends."""

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop; does nothing if the loop has ended."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until the loop has set an event; return whether it did in time."""

    def now_s(self) -> float:
        """Return the time, in seconds, of the clock of `wait`."""

    def join(self, timeout_s: float) -> None:
        """Wait until `on_end` has returned, at most `timeout_s`."""


class LoopThread:
    """See `Loop`: a thread that creates and runs one event loop, uvloop's if installed."""

    # Set once, by `start` and its thread before `start` returns.
    _thread: threading.Thread
    _event_loop: asyncio.AbstractEventLoop | None = None  # None if it could not be made

    def __init__(self, make_event_loop: MakeEventLoop = new_event_loop) -> None:
        self._make_event_loop = make_event_loop
        self._has_begun = threading.Event()
        self.news = threading.Event()

    def start(self, main: Main, on_end: Callable[[], None]) -> None:
        assert not self._has_begun.is_set()
        self._thread = threading.Thread(
            target=self._run, args=(main, on_end), name="safe-offload-loop", daemon=True
        )
        self._thread.start()
        self._has_begun.wait()

    def call(self, function: Callable[..., object], *args: object) -> None:
        if self._event_loop is None:
            return
        try:
            self._event_loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("The transfer loop has ended; %s is not run.", function.__name__)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)

    def now_s(self) -> float:
        return time.monotonic()

    def join(self, timeout_s: float) -> None:
        """See `Loop.join`; a thread that does not end remains, as a daemon."""
        self._thread.join(timeout_s)

    def _run(self, main: Main, on_end: Callable[[], None]) -> None:
        try:
            with asyncio.Runner(loop_factory=self._make_event_loop) as runner:
                self._event_loop = runner.get_loop()
                # `main` is queued right behind this, before anything that another thread calls.
                self._event_loop.call_soon(self._has_begun.set)
                runner.run(main())
        except BaseException:
            logger.exception(
                "The transfer loop of this worker died. Offloading is off until the server is "
                "restarted; vLLM serves without host hits. Open an issue with this log."
            )
        finally:
            on_end()
            self._has_begun.set()
