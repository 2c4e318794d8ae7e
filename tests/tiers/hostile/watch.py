"""What must not happen while a tier talks to a hostile server, and how it is noticed."""

import asyncio
import ctypes
import gc
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from safe_offload.tiers.base import Buffers, Name, Result, Tier
from tests.tiers.contract import bytes_of, put, slot_of
from tests.tiers.hostile.answers import MARK

TICK_S = 0.005
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 64 << 10
LOG_LENGTH_MAX = 2000
HUNG = "has not returned"


class Findings:
    """What was found, each once, with how often."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, what: str) -> None:
        """Note something that must not be."""
        self._counts[what[:500]] += 1

    def lines(self) -> list[str]:
        """Return what was found."""
        return [f"{what} ({count} times)" for what, count in self._counts.items()]


class LogWatch(logging.Handler):
    """Reads every line of the log that an operator would see. `secrets`: must be in none."""

    def __init__(self, findings: Findings, secrets: Sequence[str]) -> None:
        super().__init__(logging.INFO)
        self._findings = findings
        self._secrets = secrets
        self.num_records = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Judge one line."""
        self.num_records += 1
        message = record.getMessage()
        text = logging.Formatter().format(record)
        where = f"the log, {record.name}"
        if not message.isprintable():
            self._findings.add(f"{where}: what cannot be printed: {message[:300]!r}")
        elif any(line.startswith((MARK, f"ERROR {MARK}")) for line in text.split("\n")):
            self._findings.add(f"{where}: a forged line: {text[:300]!r}")
        if any(secret in text for secret in self._secrets):
            self._findings.add(f"{where}: a secret: {text[:300]!r}")
        if len(text) > LOG_LENGTH_MAX:
            self._findings.add(f"{where}: more than {LOG_LENGTH_MAX} characters: {text[:200]!r}")
        if record.name == "asyncio":
            self._findings.add(f"{where}: {text[-400:]!r}")
        if HUNG in message:
            self._findings.add(f"{where}: a call hangs: {message[:200]!r}")


def do_job() -> None:
    """Do work of a fixed size, which is what pauses are measured in."""
    sum(range(20_000))


class PauseWatch:
    """How long the event loop did nothing else, in jobs.

    A job takes the thread's own time that it takes on this machine while the loop runs: neither a
    slow machine nor a busy one makes a pause of more jobs. Collecting garbage does not count: how
    long it takes depends on what the rest of the process holds.
    """

    def __init__(self) -> None:
        self._longest_s, self._jobs_s, self._num_jobs = 0.0, 0.0, 0
        self._thread = threading.get_ident()
        self._collecting_s = self._collecting_since_s = 0.0

    @property
    def longest_jobs(self) -> float:
        """Return how many jobs the longest pause was."""
        return self._longest_s * self._num_jobs / self._jobs_s if self._jobs_s else 0.0

    async def run(self) -> None:
        """Watch until it is cancelled."""
        gc.callbacks.append(self._note_collection)
        try:
            last_s = self._time_s()
            while True:
                begin_s = self._time_s()
                do_job()
                self._jobs_s += self._time_s() - begin_s
                self._num_jobs += 1
                await asyncio.sleep(TICK_S)
                now_s = self._time_s()
                self._longest_s, last_s = max(self._longest_s, now_s - last_s), now_s
        finally:
            gc.callbacks.remove(self._note_collection)

    def _time_s(self) -> float:
        return time.thread_time() - self._collecting_s

    def _note_collection(self, phase: str, _: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        else:
            self._collecting_s += time.thread_time() - self._collecting_since_s


class Slots:
    """Host slots with a pattern in them while no call may write there."""

    def __init__(self, findings: Findings, lengths: Sequence[int], count: int) -> None:
        self._findings = findings
        self._lengths = lengths
        size = sum(lengths)
        self.pattern = (b"\xa5untouched\x5a" * (size // 11 + 1))[:size]
        self._free: deque[Buffers] = deque()
        for _ in range(count):
            self.give_back([slot_of(lengths)])

    def take(self, count: int) -> list[Buffers]:
        """Return those that were given back longest ago."""
        taken = [self._free.popleft() for _ in range(count)]
        for slot in taken:
            self._check(slot)
        return taken

    def give_back(self, slots: Sequence[Buffers]) -> None:
        """From now on nothing may write there."""
        for slot in slots:
            put(slot, self.pattern)
            self._free.append(slot)

    def check(self) -> None:
        """Look at all that are not taken."""
        for slot in self._free:
            self._check(slot)

    def _check(self, slot: Buffers) -> None:
        if bytes_of(slot) != self.pattern:
            self._findings.add("a slot was written to after its call had returned")


class WatchedTier:
    """A tier whose answers are held against what `base.py` says."""

    def __init__(self, tier: Tier, findings: Findings) -> None:
        self._tier = tier
        self._findings = findings
        self.label = tier.label
        self.used_bytes = tier.used_bytes
        self.num_evicted = 0
        self.num_restarts = 0
        self.raised: Counter[str] = Counter()

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        """See `Tier.probe`."""
        return await self._call("probe", bool, names)

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        """See `Tier.fetch`."""
        return await self._call("fetch", Result, names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        """See `Tier.spill`."""
        return await self._call("spill", Result, names, slots)

    async def close(self) -> None:
        """See `Tier.close`."""
        try:
            await self._tier.close()
        except BaseException as error:
            self._judge("close", error)
            raise

    async def _call(self, what: str, kind: type, names: Sequence[Name], *slots: Any) -> Any:
        try:
            found = await getattr(self._tier, what)(names, *slots)
        except BaseException as error:
            if what != "probe" or not isinstance(error, asyncio.CancelledError):
                self._judge(what, error)
            raise
        is_list = isinstance(found, list) and len(found) == len(names)
        if not is_list or not all(isinstance(each, kind) for each in found):
            self._findings.add(f"{what} of {len(names)} objects returns {found!r}")
        return found

    def _judge(self, what: str, error: BaseException) -> None:
        if isinstance(error, OSError):
            self.raised[f"{what} {type(error).__name__}"] += 1
        else:
            self._findings.add(f"{what} raises {error!r}")


# ---- what a process holds ---------------------------------------------------------------------


class Held:
    """What this process holds now: tasks, files and sockets, threads, memory."""

    def __init__(self) -> None:
        gc.collect()
        self.num_tasks = len(asyncio.all_tasks())
        self.num_files = len(os.listdir("/proc/self/fd"))
        self.num_threads = len(os.listdir("/proc/self/task"))
        self.rss_bytes = _memory("VmRSS")

    def __str__(self) -> str:
        return (
            f"{self.num_tasks} tasks, {self.num_files} files, {self.num_threads} threads, "
            f"{self.rss_bytes >> 20} MiB"
        )


def give_back_large_blocks() -> None:
    """Let malloc return what is free to the system, so that what is held is what is in use.

    Source: mallopt(3): a threshold that is set no longer grows with what was freed.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def start_peak() -> None:
    """Let the peak of memory begin again."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    """Return the most memory that was resident since `start_peak`."""
    return _memory("VmHWM")


def _memory(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")
