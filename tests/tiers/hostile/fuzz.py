"""Traffic of some tiers with one hostile server, and what must hold of it."""

import asyncio
import logging
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import guarded_tier
from safe_offload.tiers.base import Name, Result, Tier
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import HEADER_BYTES, namespace
from safe_offload.tiers.valkey import servers as valkey_servers
from safe_offload.worker.loop_thread import new_event_loop
from tests.tiers.contract import bytes_of, filled, put
from tests.tiers.hostile.answers import PASSWORD
from tests.tiers.hostile.server import HostileServer
from tests.tiers.hostile.watch import (
    Findings,
    Held,
    LogWatch,
    PauseWatch,
    Slots,
    WatchedTier,
    give_back_large_blocks,
    peak_bytes,
    start_peak,
)

LENGTHS = (4096, 40_001, 13, 4096, 86_962)
SLOT_BYTES = sum(LENGTHS)
NUM_KEYS = 64
NUM_TIERS = 3
NUM_CONNECTIONS = 4
NUM_NAMES_MAX = 12
NUM_SLOTS = NUM_TIERS * (2 + 1) * NUM_NAMES_MAX + NUM_KEYS
TIMEOUT_S = 0.3
TIMEOUT_ROUNDS = 4
"""A tier's timeout is at least as long as all objects take this often with a good server."""
PATIENCE_S = 300.0
"""Of what would never end."""
SLACK_BYTES = 8 << 20
GROWTH_BYTES_MAX = 16 << 20
NUM_THREADS_OF_LIBRARIES = 64
"""That look up names, and end by themselves after a while."""
NUM_NEW_KEPT = 16
PAUSE_JOBS_MAX = 4000
"""Generous: a second on the machine that this was written on; see `watch.PauseWatch`."""
RECOVERY_ROUNDS = 20
NUM_FILES_OF_LIBRARIES = 6
"""Of their event loops, which stay until the process ends."""
FACTS = {"model": "hostile"}
GRACE_S = 250.0
PAUSE_FACTOR = -0.5
"""As chance of a breaker: its pauses are over at once."""

OpenTier = Callable[[TierConfig], Tier]


@dataclass
class Report:
    """What one run did."""

    seed: int
    findings: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)  # of objects, by kind of call
    num_right: int = 0
    peak_bytes: int = 0  # of resident memory above what was held before
    growth_bytes: int = 0  # of resident memory, between the first quarter and the end
    quarter_bytes: list[int] = field(default_factory=list)  # resident memory after each quarter
    pause_jobs: float = 0.0
    timeout_s: float = TIMEOUT_S
    num_files_max: int = 0
    num_log_lines: int = 0
    trapped: int = 0
    proofs: dict[str, int] = field(default_factory=dict)
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        num_answers = sum(self.answers.values())
        return "\n".join(
            (
                f"seed {self.seed}: {num_answers} answers, {self.num_right} objects right",
                "answers: " + ", ".join(f"{k} {n}" for k, n in sorted(self.answers.items())),
                "results: " + ", ".join(f"{k} {n}" for k, n in sorted(self.results.items())),
                f"memory: peak {self.peak_bytes / 2**20:.1f} MiB above what was held before, "
                f"after quarters {', '.join(str(held >> 20) for held in self.quarter_bytes)} MiB",
                f"longest pause of the loop: {self.pause_jobs:.0f} jobs; timeouts "
                f"{self.timeout_s:.1f} s",
                f"before: {self.before}; after: {self.after}; files at most {self.num_files_max}; "
                f"{self.num_log_lines} log lines",
                f"connections to the trap: {self.trapped}, with {self.proofs or 'nothing'}",
                *(self.findings or ["no findings"]),
            )
        )


def open_network_tier(config: TierConfig) -> Tier:
    """Return the tier that an engine would use."""
    return open_tier(config, SLOT_BYTES, FACTS)[0]


def config_of(server: HostileServer, timeout_s: float) -> TierConfig:
    """Return the settings of a tier on a hostile server."""
    url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}"
    return TierConfig.at(url, timeout_s=timeout_s, num_connections=NUM_CONNECTIONS)


class Fuzz:
    """One run of some tiers against one server.

    `open_tier`: how a tier is made; it may be a bad one, to see that it is found out.
    """

    def __init__(
        self, server: HostileServer, seed: int, open_tier: OpenTier = open_network_tier
    ) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._findings = Findings()
        self._slots = Slots(self._findings, LENGTHS, NUM_SLOTS)
        self._names = [_name_of(number, number % 2) for number in range(NUM_KEYS)]
        self._strange = [_name_of(number, 2) for number in range(NUM_KEYS)]
        self._new: deque[Name] = deque(maxlen=NUM_NEW_KEPT)
        self._num_new = 0
        self._right = [bytes_of(filled(LENGTHS, number)) for number in range(NUM_KEYS)]
        self._open_tier = open_tier
        self._tiers: list[WatchedTier] = []
        self._guarded_tiers: list[GuardedTier] = []
        self._has_ended = False
        self.report = Report(seed)

    def run(
        self, num_answers: int, *, only: tuple[str, ...] = (), num_good_of_100: int = 40
    ) -> Report:
        """Take `num_answers`; return what happened."""
        give_back_large_blocks()
        log = LogWatch(self._findings, (PASSWORD,))
        with _heard_by(log), _short_pauses():
            runner = asyncio.Runner(loop_factory=new_event_loop)
            with runner:
                runner.run(self._run(num_answers, only, num_good_of_100))
        self.report.num_log_lines = log.num_records
        self.report.findings = self._findings.lines()
        return self.report

    # ---- phases -------------------------------------------------------------------------------

    async def _run(self, num_answers: int, only: tuple[str, ...], num_good_of_100: int) -> None:
        report, server = self.report, self._server
        server.be_good()
        report.timeout_s = await self._find_timeout_s()
        first = Held()
        config = config_of(server, report.timeout_s)
        for _ in range(NUM_TIERS):
            tier = WatchedTier(self._open_tier(config), self._findings)
            self._tiers.append(tier)
            self._guarded_tiers.append(self._guarded_tier_of(tier, config))
        await self._be_served("at first")
        await self._be_served("at first")
        before = Held()
        pauses = PauseWatch()
        watching = asyncio.ensure_future(pauses.run())
        start_peak()
        report.results.clear()
        report.num_right = 0
        server.be_hostile(report.seed, only=only, num_good_of_100=num_good_of_100)
        traffic = [
            asyncio.ensure_future(work(guarded, random.Random(self._rng.random())))
            for guarded in self._guarded_tiers
            for work in (self._fetch, self._fetch, self._spill, self._probe)
        ]
        await self._wait_for_answers(num_answers)
        self._has_ended = True
        await asyncio.wait(traffic)
        for task in traffic:
            task.result()
        report.peak_bytes = peak_bytes() - before.rss_bytes
        results, num_right = report.results.copy(), report.num_right
        watching.cancel()
        report.answers = server.status()["counts"]
        report.trapped, report.proofs = (server.status()[key] for key in ("trapped", "proofs"))
        server.be_good()
        await self._be_served("afterwards")
        after = Held()
        report.growth_bytes = after.rss_bytes - report.quarter_bytes[0]
        report.before, report.after = str(before), str(after)
        report.pause_jobs = pauses.longest_jobs
        report.results, report.num_right = results, num_right
        self._compare(before, after)
        for guarded in self._guarded_tiers:
            await asyncio.wait_for(guarded.close(), PATIENCE_S)
        self._slots.check()
        await asyncio.sleep(report.timeout_s)
        for tier in self._tiers:
            report.results.update({f"raised by {what}": n for what, n in tier.raised.items()})
        self._tiers.clear()
        self._guarded_tiers.clear()
        self._compare_closed(first, Held())

    async def _find_timeout_s(self) -> float:
        """Write and read everything once; return a timeout by how long that takes here and now."""
        tier = open_network_tier(config_of(self._server, PATIENCE_S))
        slots = self._slots.take(NUM_KEYS)
        for slot, right in zip(slots, self._right, strict=True):
            put(slot, right)
        begin_s = time.monotonic()
        for move in (tier.spill, tier.fetch):
            await move(self._names, slots)
        taken_s = time.monotonic() - begin_s
        await tier.close()
        self._slots.give_back(slots)
        return max(TIMEOUT_S, TIMEOUT_ROUNDS * taken_s)

    def _guarded_tier_of(self, tier: WatchedTier, config: TierConfig) -> GuardedTier:
        return GuardedTier(
            tier,
            config,
            lambda generation: namespace(FACTS, generation),
            slot_bytes=SLOT_BYTES,
            chance=lambda: PAUSE_FACTOR,
        )

    async def _wait_for_answers(self, count: int) -> None:
        """Wait until `count` were given; after each quarter note the memory that is held."""
        loop = asyncio.get_running_loop()
        last, last_s = -1, loop.time()
        quarters = self.report.quarter_bytes
        while (done := self._server.status()["num_answers"]) < count:
            if done != last:
                last, last_s = done, loop.time()
            elif loop.time() - last_s > PATIENCE_S:
                self._findings.add(f"for {PATIENCE_S:g} s nothing has been asked of the server")
                break
            if done * 4 >= count * (len(quarters) + 1):
                quarters.append(Held().rss_bytes)
            num_files = len(os.listdir("/proc/self/fd"))
            self.report.num_files_max = max(self.report.num_files_max, num_files)
            await asyncio.sleep(0.1)
        quarters.append(Held().rss_bytes)

    async def _be_served(self, when: str) -> None:
        """Every tier comes to write and read all objects of a server that answers well."""
        for guarded in self._guarded_tiers:
            usual = guarded.config
            for attempt in range(RECOVERY_ROUNDS):
                # The machine may be busier than when `_find_timeout_s` ran.
                timeout_s = min(usual.timeout_s * 2**attempt, PATIENCE_S)
                guarded.config = replace(usual, timeout_s=timeout_s)
                await self._spill_these(guarded, self._names)
                results = await self._fetch_these(guarded, self._names)
                found = await guarded.probe(self._names)
                bad = {Result.CORRUPT, Result.FOREIGN} & set(results)
                if bad:
                    self._findings.add(f"{when}: the server holds {bad} of what tiers wrote")
                if set(results) == {Result.DONE} and found == [True] * NUM_KEYS:
                    break
                await asyncio.sleep(0.05)
            else:
                counts = Counter(result.value for result in results)
                self._findings.add(f"{when}: a good server is not used: {dict(counts)}, {guarded}")
            guarded.config = usual
        for guarded in self._guarded_tiers:
            guarded.take_calls()

    def _compare(self, before: Held, after: Held) -> None:
        """Nothing has grown while the server was bad."""
        report, findings = self.report, self._findings
        object_bytes = SLOT_BYTES + HEADER_BYTES
        limit_bytes = NUM_TIERS * NUM_CONNECTIONS * object_bytes + SLACK_BYTES
        if report.peak_bytes > limit_bytes:
            findings.add(f"memory rose by {report.peak_bytes >> 20} MiB, over {limit_bytes >> 20}")
        if report.growth_bytes > GROWTH_BYTES_MAX:
            findings.add(f"memory has grown by {report.growth_bytes >> 20} MiB")
        if after.num_tasks > before.num_tasks:
            findings.add(f"tasks: {before.num_tasks}, then {after.num_tasks}")
        num_connections = NUM_TIERS * NUM_CONNECTIONS
        if max(after.num_files, report.num_files_max) > before.num_files + 2 * num_connections:
            findings.add(f"files: {before}; {after}; at most {report.num_files_max}")
        if after.num_threads > before.num_threads + NUM_THREADS_OF_LIBRARIES:
            findings.add(f"threads: {before.num_threads}, then {after.num_threads}")
        if report.pause_jobs > PAUSE_JOBS_MAX:
            findings.add(f"the loop did nothing else for {report.pause_jobs:.0f} jobs")

    def _compare_closed(self, first: Held, last: Held) -> None:
        if last.num_tasks > first.num_tasks:
            tasks = [str(task)[:200] for task in asyncio.all_tasks()]
            self._findings.add(f"tasks are left when all is closed: {tasks}")
        if last.num_files > first.num_files + NUM_FILES_OF_LIBRARIES:
            self._findings.add(f"files are left when all is closed: {first}; {last}")

    # ---- traffic ------------------------------------------------------------------------------

    async def _fetch(self, guarded: GuardedTier, rng: random.Random) -> None:
        while not self._has_ended:
            names = [*self._names, *self._new]
            await self._fetch_these(guarded, rng.sample(names, rng.randrange(1, NUM_NAMES_MAX + 1)))
            await asyncio.sleep(0)

    async def _spill(self, guarded: GuardedTier, rng: random.Random) -> None:
        while not self._has_ended:
            names = rng.sample(self._names, rng.randrange(1, NUM_NAMES_MAX // 2 + 1))
            for _ in names[::2]:
                self._num_new += 1
                name = _name_of(self._num_new, 3)
                self._new.append(name)
                names.append(name)
            await self._spill_these(guarded, names)
            await asyncio.sleep(0)

    async def _fetch_these(self, guarded: GuardedTier, names: Sequence[Name]) -> Sequence[Result]:
        slots = self._slots.take(len(names))
        results = await guarded.fetch(names, slots) or []
        for name, slot, result in zip(names, slots, results, strict=False):
            self.report.results[f"fetch {result.value}"] += 1
            if result is not Result.DONE:
                continue
            if bytes_of(slot) == self._right_of(name):
                self.report.num_right += 1
            else:
                self._findings.add("an object with wrong bytes was served")
        self._slots.give_back(slots)
        return results

    async def _spill_these(self, guarded: GuardedTier, names: Sequence[Name]) -> Sequence[Result]:
        slots = self._slots.take(len(names))
        for name, slot in zip(names, slots, strict=True):
            put(slot, self._right_of(name))
        results = await guarded.spill(names, slots) or []
        self._slots.give_back(slots)
        self.report.results.update(f"spill {result.value}" for result in results)
        return results

    def _right_of(self, name: Name) -> bytes:
        return self._right[int.from_bytes(name.block_hash, "big") % NUM_KEYS]

    async def _probe(self, guarded: GuardedTier, rng: random.Random) -> None:
        while not self._has_ended:
            names = rng.sample(self._names + self._strange, rng.randrange(1, NUM_KEYS + 1))
            found = await guarded.probe(names)
            what = "no answer" if found is None else "answer"
            self.report.results[f"probe {what}"] += 1
            await asyncio.sleep(0.02)


@contextmanager
def _heard_by(handler: logging.Handler) -> Iterator[None]:
    """Let a handler have all lines of the log."""
    loggers = [logging.getLogger(), logging.getLogger("vllm")]
    heard = [logger for logger in loggers if logger.parent is None or not logger.propagate]
    for logger in heard:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in heard:
            logger.removeHandler(handler)


@contextmanager
def _short_pauses() -> Iterator[None]:
    """Let servers of a cluster be tried again soon, and calls hang late: the machine is busy."""
    pauses = patch.multiple(valkey_servers, PAUSE_S=0.02, PAUSE_S_MAX=0.02)
    with pauses, patch.object(guarded_tier, "GRACE_S", GRACE_S):
        yield


def _name_of(number: int, group_idx: int) -> Name:
    return Name(namespace(FACTS), group_idx, number.to_bytes(32, "big"))


def run(protocol: str, folder: Path, seed: int, num_answers: int, **how: object) -> Report:
    """Start a server, take `num_answers`, and return what happened."""
    with HostileServer(protocol, folder) as server:
        return Fuzz(server, seed).run(num_answers, **how)  # type: ignore[arg-type]
