"""A tier in a dictionary whose calls end when the test says so, on a loop that the test turns."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.worker.loop_thread import Main
from tests.simulator.virtual_loop import Clock, VirtualLoop

TURNS = 40
"""More turns of a loop than anything takes that does not wait for time or for the test."""


class HandLoop:
    """See `Loop`: it turns, and time passes, when the test says so."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.event_loop = VirtualLoop(self.clock)
        self.has_ended = False
        self.news = threading.Event()

    def start(self, main: Main, on_end: Callable[[], None]) -> None:
        """See `Loop.start`."""
        self._on_end = on_end
        self._main = self.event_loop.create_task(main())
        self.turn()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """See `Loop.call`."""
        if not self.has_ended:
            self.event_loop.call_soon(function, *args)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """See `Loop.wait`."""
        deadline_s = self.now_s() + timeout_s
        while not event.is_set() and self.now_s() < deadline_s:
            self.pass_time(0.05)
        return event.is_set()

    def now_s(self) -> float:
        """See `Loop.now_s`."""
        return self.clock.now_s

    def join(self, timeout_s: float) -> None:
        """See `Loop.join`."""

    def turn(self) -> None:
        """Do everything that needs no time."""
        for _ in range(TURNS):
            if not self.has_ended:
                self.event_loop.run_once()
                if self._main.done():
                    self.has_ended = True
                    if not self._main.cancelled():
                        self._main.exception()  # seen, so that asyncio does not complain
                    self._on_end()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and what is due then happen."""
        self.turn()
        self.clock.advance(seconds)
        self.turn()

    def kill(self) -> None:
        """Let the loop die."""
        self.call(self._main.cancel)
        self.turn()


class HandTier:
    """See `Tier`. `touched`: buffers that a call may still touch."""

    def __init__(self, label: str = "hand", objects: dict[Name, bytes] | None = None) -> None:
        self.label = label
        self.objects: dict[Name, bytes] = {} if objects is None else objects  # by name, whole slots
        self.num_evicted = 0
        self.num_restarts = 0
        self.calls: list[str] = []  # every call so far, "fetch 3" for one of three objects
        self.holds: set[str] = set()  # of the kinds of calls that wait for `release`
        # Such a call cannot be given up: as a thread in the kernel, it hangs.
        self.ignores_cancel = False
        # For the next calls of a kind, in place of the truth: an answer, or what to raise.
        self.answers: dict[str, list[Any]] = {}
        self.touching = 0
        self.is_closed = False
        self._gates: list[asyncio.Future[None]] = []

    @property
    def used_bytes(self) -> int:
        """See `Tier.used_bytes`."""
        return sum(map(len, self.objects.values()))

    def release(self, count: int = 1000) -> None:
        """Let calls that are held go on."""
        for gate in self._gates[:count]:
            if not gate.done():
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    gate.get_loop().call_soon_threadsafe(_open, gate)
        del self._gates[:count]

    async def probe(self, names: Sequence[Name]) -> Any:
        """See `Tier.probe`."""
        await self._begin("probe", names)
        return self._answer("probe", [name in self.objects for name in names])

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> Any:
        """See `Tier.fetch`."""
        if not await self._begin("fetch", names, touches=True):
            return [Result.CANCELLED] * len(names)
        results = []
        for name, buffers in zip(names, slots, strict=True):
            if name in self.objects:
                _read(self.objects[name], buffers)
            results.append(Result.DONE if name in self.objects else Result.ABSENT)
        return self._answer("fetch", results)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> Any:
        """See `Tier.spill`."""
        if not await self._begin("spill", names, touches=True):
            return [Result.CANCELLED] * len(names)
        results = []
        for name, buffers in zip(names, slots, strict=True):
            results.append(Result.PRESENT if name in self.objects else Result.DONE)
            self.objects[name] = b"".join(buffers)
        return self._answer("spill", results)

    async def close(self) -> None:
        """See `Tier.close`."""
        await self._begin("close", ())
        self.is_closed = True

    async def _begin(self, kind: str, names: Sequence[Name], *, touches: bool = False) -> bool:
        """Return whether the call goes on: it was not given up while it was held."""
        self.calls.append(f"{kind} {len(names)}")
        if kind not in self.holds:
            return True
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gates.append(gate)
        self.touching += touches
        goes_on = True
        try:
            while not gate.done():
                try:
                    await asyncio.shield(gate)
                except asyncio.CancelledError:
                    if not touches and not self.ignores_cancel:
                        raise
                    goes_on = self.ignores_cancel
                    if not self.ignores_cancel:
                        break
        finally:
            self.touching -= touches
        return goes_on

    def _answer(self, kind: str, truth: list[Any]) -> Any:
        if not self.answers.get(kind):
            return truth
        answer = self.answers[kind].pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _open(gate: asyncio.Future[None]) -> None:
    if not gate.done():
        gate.set_result(None)


def _read(content: bytes, buffers: Buffers) -> None:
    at = 0
    for buffer in buffers:
        buffer[:] = content[at : at + len(buffer)]
        at += len(buffer)
