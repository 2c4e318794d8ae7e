"""Runs the probes, fetches and spills of a rank.

Each message is a coroutine on the loop of the transfers, and is answered exactly once. A tier that
fails, lies or hangs is a miss. A fetch or a spill is answered only after the tiers have released
its slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from safe_offload.config.tier_url import FILE
from safe_offload.config.tiers import MAX_TIERS
from safe_offload.observe.counters import TIER_SERIES, TIERS_NOT_READY, Counters, TierSeries
from safe_offload.protocol import (
    ALL_TIERS,
    FailureReason,
    Keys,
    Outcome,
    Presence,
    Probe,
    TierTransfer,
)
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.guarded_tier import LEFT_ALONE, Call, GuardedTier, Operation
from safe_offload.tiers.namespace.namespace_facts import Doubt, Learned, NamespaceFacts
from safe_offload.tiers.tiered_probe import TieredProbe
from safe_offload.worker.copies.base import Backend
from safe_offload.worker.loop_thread import Loop
from safe_offload.worker.memory.shared_memory import ALONE, Share
from safe_offload.worker.verify import Verifier

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

TAKEN = (Result.DONE, Result.PRESENT)
REFUSED = (Result.FULL, Result.STILL_FULL, Result.REFUSED, Result.UNREADABLE)
"""Results that are not retried; except FULL, if other objects of the call found room and no other
tier has the block."""


@dataclass(slots=True, eq=False, repr=False)
class PendingMessage:
    """An unanswered message; see `TierTransfer` and `Presence`.

    The loop's thread changes it; vLLM's thread settles it if the loop has ended.

    Attributes:
        number: id of the probe or of the transfer.
        origins, targets: one per key, never empty.
        places: of a fetch or a spill, the indices of this rank's keys.
        missing: the places that have not been transferred.
        again: of a spill, see `Outcome.again`.
        task: that answers it; None before the loop has started it.
    """

    operation: Operation
    number: int
    keys: Keys
    generation: str
    origins: bytes = b""
    slot_ids: Sequence[int] = ()
    places: Sequence[int] = ()
    marks: Sequence[int] = ()
    targets: bytes = b""
    tiers: bytes = field(init=False)
    missing: Sequence[int] = ()
    again: bytes = b""
    failure: FailureReason | None = None
    is_settled: bool = False
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.tiers = bytes(len(self.keys))
        self.origins = self.origins or bytes(len(self.keys))
        self.targets = self.targets or bytes([ALL_TIERS]) * len(self.keys)

    def __repr__(self) -> str:
        return f"<{self.operation.value} {self.number} of {len(self.keys)} keys>"

    def keys_at(self, places: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return group and hash of some of the keys."""
        group_ids, hashes = self.keys.group_ids, self.keys.hashes
        return [(group_ids[place], hashes[place]) for place in places]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers since the last `drain`."""

    presences: tuple[Presence, ...]
    outcomes: tuple[Outcome, ...]


class TierRunner:
    """The tiers of one rank, nearest first, at most `MAX_TIERS`.

    `run`, `close` and `end` belong to the loop's thread; all other public methods to the thread of
    vLLM's hooks.

    Args:
        loop: of the transfers, which also run this (`Transfers`).
        slot_of: returns a slot as the tiers take it. It may refer to the memory, so it is dropped
            before that is freed.
        share: this rank's part of each fetch and spill.
        verifier: records the checksums of fetched slots.
        namespace_facts: if they must be learned first. Tiers are not used before; spills wait for
            them, and probes as long as a request might wait for a tier.

    Attributes:     doubts: why the tiers serve only messages with this engine's own generation.
    """

    def __init__(  # noqa: PLR0913
        self,
        rank: int,
        guarded_tiers: Sequence[GuardedTier],
        backend: Backend,
        loop: Loop,
        *,
        slot_of: Callable[[int], Any] = int,
        share: Share = ALONE,
        verifier: Verifier | None = None,
        namespace_facts: NamespaceFacts | None = None,
    ) -> None:
        assert 0 < len(guarded_tiers) <= MAX_TIERS
        self.guarded_tiers = tuple(guarded_tiers)
        self.doubts: tuple[str, ...] = ()
        self._namespace_facts = namespace_facts
        self._rank = rank
        self._backend = backend
        self._slot_of: Callable[[int], Any] | None = slot_of
        self._loop = loop
        self._share = share
        self._verifier = verifier
        # On vLLM's thread: taken and not drained.
        self._pending: dict[tuple[Operation, int], PendingMessage] = {}
        # On the loop's thread, but for the other end of the queue.
        self._settled: deque[PendingMessage] = deque()
        self._late_probes: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._closing = asyncio.Event()
        self._is_known = asyncio.Event()
        self._is_over = threading.Event()
        self._begin_s = 0.0
        self._has_ended = False
        if namespace_facts is None:
            self._is_known.set()

    def __repr__(self) -> str:
        return f"<TierRunner of {self.guarded_tiers}: {list(self._pending.values())}>"

    # ---- on vLLM's thread ----------------------------------------------------------------------

    def probe(self, probe: Probe) -> None:
        """Probe the tiers, see `TieredProbe`."""
        self._take(PendingMessage(Operation.PROBE, probe.probe_id, probe.keys, probe.generation))

    def fetch(self, fetch: TierTransfer) -> None:
        """Read each key from its origin, or else from the nearest tier that has it."""
        self._take(self._part_of(Operation.FETCH, fetch))

    def spill(self, spill: TierTransfer) -> None:
        """Write to all tiers, or to nearer ones that keep copies of a farther one's objects."""
        self._take(self._part_of(Operation.SPILL, spill))

    @property
    def is_busy(self) -> bool:
        """Return whether there are messages that have not been drained."""
        return bool(self._pending)

    def drain(self) -> Answers:
        """Return the answers since the last call."""
        if self._has_ended:
            for pending in self._pending.values():
                if not pending.is_settled:
                    self._settle(pending, FailureReason.NOT_RUNNING)
        presences, outcomes = [], []
        while self._settled:
            pending = self._settled.popleft()
            del self._pending[pending.operation, pending.number]
            if pending.operation is Operation.PROBE:
                presences.append(Presence(self._rank, pending.number, pending.tiers))
            else:
                missing = () if pending.failure else tuple(pending.missing)
                done = pending.number, pending.failure, missing, pending.again
                outcomes.append(Outcome(self._rank, *done))
        return Answers(tuple(presences), tuple(outcomes))

    def count_into(self, counters: Counters) -> None:
        """Count the tiers' results since the last call."""
        for guarded, series in zip(self.guarded_tiers, TIER_SERIES, strict=False):
            counters[series.evicted_objects] += guarded.take_evicted()
            counters[series.restarts] += guarded.take_restarts()
            for call in guarded.take_calls():
                if call.seconds or LEFT_ALONE not in call.results:
                    counters.observe(series.seconds[call.operation.value], call.seconds)
                _count(call, series, counters)

    def gauges(self) -> dict[str, float]:
        """Return the gauges of the tiers."""
        gauges: dict[str, float] = {TIERS_NOT_READY: not self._is_known.is_set()}
        for guarded, series in zip(self.guarded_tiers, TIER_SERIES, strict=False):
            if guarded.config.location.scheme == FILE:  # other kinds do not know
                gauges[series.stored_bytes] = max(0, guarded.tier.used_bytes)
            gauges[series.capacity_bytes] = guarded.config.limit_bytes or 0
            gauges[series.is_out["read"]] = guarded.is_out
            gauges[series.is_out["write"]] = guarded.is_out_for_writing
        return {str(name): float(value) for name, value in gauges.items()}

    def statistics(self) -> tuple[PendingMessage, ...]:
        """Return statistics of the undrained messages."""
        return tuple(self._pending.values())

    def _part_of(self, operation: Operation, transfer: TierTransfer) -> PendingMessage:
        number, keys = transfer.transfer_id, transfer.keys
        places = self._share.part(len(keys), number)
        more = transfer.origins, transfer.slot_ids, places, transfer.marks, transfer.targets
        return PendingMessage(operation, number, keys, transfer.generation, *more)

    def _take(self, pending: PendingMessage) -> None:
        key = pending.operation, pending.number
        assert key not in self._pending
        self._pending[key] = pending
        if pending.operation is not Operation.PROBE:
            num_slots = self._backend.num_usable_slots
            if not all(0 <= slot_id < num_slots for slot_id in pending.slot_ids):
                logger.error("%r refers to slots that do not exist", pending)
                self._settle(pending, FailureReason.BAD_PLAN)
                return
            if not pending.places:
                self._settle(pending)  # other ranks do all of it
                return
        self._loop.call(self._spawn, pending)

    # ---- on the loop's thread ------------------------------------------------------------------

    async def run(self) -> None:
        """Run until `close`, and until the tiers have released all slots."""
        if self._namespace_facts is not None:
            self._begin_s = asyncio.get_running_loop().time()
            learn = functools.partial(self._learn, self._namespace_facts)
            threading.Thread(target=learn, name="safe-offload-learn", daemon=True).start()
        try:
            async with self._group:
                if self._namespace_facts is not None:
                    for guarded in self.guarded_tiers:
                        self._late_probes.add(self._group.create_task(guarded.try_out()))
                await self._closing.wait()
                # A list, made at one go: vLLM's thread may add to what there is.
                answering = [each.task for each in list(self._pending.values()) if each.task]
                for task in (*answering, *self._late_probes):
                    task.cancel()
        finally:
            await asyncio.gather(*(guarded.close() for guarded in self.guarded_tiers))

    def close(self) -> None:
        """Cancel messages not begun, and let `run` end after the others."""
        self._is_over.set()
        self._closing.set()

    def end(self) -> bool:
        """Record the end of the loop; return whether no tier uses the memory any more."""
        self._has_ended = True
        if any(guarded.num_running for guarded in self.guarded_tiers):
            return False  # the loop died twice over: while it waited for them
        self._slot_of = None
        return True

    def _spawn(self, pending: PendingMessage) -> None:
        if not self._closing.is_set():
            answering = self._answer(pending)
            try:
                pending.task = self._group.create_task(answering)
                return
            except RuntimeError:  # the group is shutting down
                answering.close()
        self._settle(pending, FailureReason.NOT_RUNNING)

    async def _answer(self, pending: PendingMessage) -> None:
        """Answer one message; no exception leaves this frame."""
        failure: FailureReason | None = None
        try:
            await self._work(pending)
        except asyncio.CancelledError:
            failure = FailureReason.CANCELLED
        except Exception:
            logger.exception("%r failed", pending)
            failure = FailureReason.COPY_FAILED
        self._settle(pending, failure)

    def _learn(self, namespace_facts: NamespaceFacts) -> None:
        try:
            learned = namespace_facts.learn(self._is_over.is_set)
        except Exception as error:  # whatever is wrong with the files
            logger.exception("The model's files could not be hashed")
            learned = Learned({}, (Doubt(f"its files could not be read: {error!r}"),), "nothing")
        if learned is not None:
            self._loop.call(self._know, namespace_facts, learned)

    def _know(self, namespace_facts: NamespaceFacts, learned: Learned) -> None:
        namespace_facts.take(learned)
        # All tiers have the facts that decide this in common.
        self.doubts = namespace_facts.doubts_of(self.guarded_tiers[0].config)
        self._is_known.set()
        logger.info(
            "Tiers of rank %d are in use, in namespace %s (%s).",
            self._rank,
            ", ".join(guarded.namespace("").hex() for guarded in self.guarded_tiers),
            learned.summary,
        )

    async def _has_namespace(self, pending: PendingMessage) -> bool:
        """Return whether the tiers have a namespace for a message; wait for it if that is due."""
        if not self._is_known.is_set():
            timeout_s = None
            if pending.operation is not Operation.SPILL:
                passed_s = asyncio.get_running_loop().time() - self._begin_s
                timeout_s = max(c.config.wait_s for c in self.guarded_tiers) - passed_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_known.wait(), timeout_s)
        return self._is_known.is_set() and bool(pending.generation or not self.doubts)

    async def _work(self, pending: PendingMessage) -> None:
        pending.missing = list(pending.places)
        if await self._has_namespace(pending):
            works = {
                Operation.PROBE: self._probe,
                Operation.FETCH: self._fetch,
                Operation.SPILL: self._spill,
            }
            await works[pending.operation](pending)

    async def _probe(self, pending: PendingMessage) -> None:
        keys = pending.keys_at(range(len(pending.keys)))
        tiered_probe = TieredProbe(self.guarded_tiers, keys, pending.generation, self._late_probes)
        await tiered_probe.run()
        pending.tiers = bytes(tiered_probe.tiers)

    async def _fetch(self, pending: PendingMessage) -> None:
        missing, origins = pending.missing, pending.origins
        by_origin: dict[int, list[int]] = {}
        for place in missing:
            by_origin.setdefault(origins[place], []).append(place)
        reads = [
            self._read(pending, number, places)
            for number, places in sorted(by_origin.items())
            if 0 < number <= len(self.guarded_tiers)
        ]
        came = await _together(reads) if len(reads) > 1 else [await read for read in reads]
        done = [place for places in came for place in places]
        for number in range(1, len(self.guarded_tiers) + 1):
            missing = sorted(set(pending.places).difference(done))
            untried = [place for place in missing if origins[place] != number]
            if untried and not _is_cancelled():
                done += await self._read(pending, number, untried)
        if done and self._verifier is not None:
            slot_ids = [pending.slot_ids[place] for place in done]
            await self._verifier.record(np.array(slot_ids, dtype=np.int64))
        pending.missing = sorted(set(pending.places).difference(done))

    async def _read(self, pending: PendingMessage, number: int, places: Sequence[int]) -> list[int]:
        """Read objects from one tier; return the places of those that came."""
        guarded = self.guarded_tiers[number - 1]
        results = await guarded.fetch(*self._named(pending, guarded, places)) or ()
        return list(compress(places, [result is Result.DONE for result in results]))

    def _named(
        self, pending: PendingMessage, guarded: GuardedTier, places: Sequence[int]
    ) -> tuple[list[Name], list[Any]]:
        assert self._slot_of is not None
        slots = [self._slot_of(pending.slot_ids[place]) for place in places]
        names = guarded.names(pending.keys_at(places), pending.generation)
        if marks := pending.marks:
            names = [replace(n, mark=marks[at]) for n, at in zip(names, places, strict=True)]
        return names, slots

    async def _spill(self, pending: PendingMessage) -> None:
        places = pending.missing
        pending.again = bytes(len(places))
        if self._verifier is not None:
            places = await self._unchanged(pending, self._verifier)
        if not places:
            return
        writes = []
        for number, guarded in enumerate(self.guarded_tiers, start=1):
            beyond = number if guarded.config.keep else len(self.guarded_tiers)
            origins, tier = pending.origins, 1 << number - 1
            wanted = [place for place in places if not origins[place] or origins[place] > beyond]
            wanted = [place for place in wanted if pending.targets[place] & tier]
            if wanted:
                writes.append(self._write(pending, guarded, wanted, tier))
        taken: set[int] = set()
        again, crowded = dict.fromkeys(pending.places, 0), []
        for tier, tried, results in await _together(writes):
            has_room = Result.DONE in results
            for place, result in zip(tried, results, strict=True):
                if result in TAKEN:
                    taken.add(place)
                elif result not in REFUSED:
                    again[place] |= tier
                elif result is Result.FULL and has_room:
                    crowded.append((place, tier))
        for place, tier in crowded:
            again[place] |= 0 if place in taken else tier
        pending.missing = [place for place, tiers in again.items() if tiers or place not in taken]
        pending.again = bytes(again[place] for place in pending.missing)

    async def _write(
        self, pending: PendingMessage, guarded: GuardedTier, places: Sequence[int], tier: int
    ) -> tuple[int, Sequence[int], Sequence[Result]]:
        """Write objects to one tier; return it, their places, and their results."""
        results = await guarded.spill(*self._named(pending, guarded, places))
        return tier, places, results or [Result.CANCELLED] * len(places)  # it was left alone

    async def _unchanged(self, pending: PendingMessage, verifier: Verifier) -> list[int]:
        """Return the places of a spill whose slots have not changed since their store."""
        slot_ids = np.array([pending.slot_ids[place] for place in pending.places], dtype=np.int64)
        bad = await verifier.changed(slot_ids)
        if bad:
            logger.warning("Checksum mismatch in slots %s, which are not written to tiers.", bad)
        return [place for place in pending.places if pending.slot_ids[place] not in bad]

    def _settle(self, pending: PendingMessage, failure: FailureReason | None = None) -> None:
        assert not pending.is_settled
        pending.failure = failure
        pending.is_settled = True
        self._settled.append(pending)
        self._loop.news.set()


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently; return, or raise, when all have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def _count(call: Call, series: TierSeries, counters: Counters) -> None:
    if call.operation is Operation.PROBE:
        return
    if call.operation is Operation.FETCH:
        reasons, objects, size_bytes = series.misses, series.read_objects, series.read_bytes
    else:
        reasons = series.dropped_spills
        objects, size_bytes = series.written_objects, series.written_bytes
    counters[objects] += call.results.get(Result.DONE.value, 0)
    counters[size_bytes] += call.size_bytes
    for reason, number in call.results.items():
        if reason in reasons:
            counters[reasons[reason]] += number
