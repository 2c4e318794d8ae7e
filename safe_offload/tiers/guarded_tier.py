"""Guards a tier: a deadline for every call, a circuit breaker for each kind of call.

Reading and writing are judged apart: a file system that has become read-only still serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import LoggedError, Name, Result, Tier, reason_of
from safe_offload.tiers.breaker import Breaker, BreakerState
from safe_offload.tiers.naming import NAMESPACE_BYTES, NAMESPACES_MAX
from safe_offload.tiers.waiting import outlast

logger = logging.getLogger(f"vllm.{__name__}")

GRACE_S = 1.0
"""How long a call may go on after it was cancelled at its deadline, before it counts as hung."""
CLOSE_TIMEOUT_S = 2.0
"""After that, a tier that does not close is abandoned."""
NUM_FETCHES, NUM_SPILLS = 2, 1
"""In flight in a tier. With two, the next fetch has begun when one ends."""
CALLS_MAX = 10_000
"""Calls kept until they are taken, which vLLM does after every step."""


class Operation(enum.Enum):
    """A kind of call."""

    PROBE = "probe"
    FETCH = "fetch"
    SPILL = "spill"


@dataclass(frozen=True, slots=True)
class Call:
    """One call to a tier: its objects by result, and the bytes read or written.

    If it was not made, it took 0.0 seconds, and the result is `LEFT_ALONE`.
    """

    operation: Operation
    seconds: float
    results: dict[str, int]
    size_bytes: int = 0


LEFT_ALONE = "left_alone"


class GuardedTier:
    """A tier with its deadlines and breakers; it belongs to the loop's thread but for `take_…`.

    Args:
        tier: is closed by `close`.
        namespace_of: from the generation of a message to the namespace of this rank's objects.
        write_bytes_per_s: of this rank; None for no limit.
        chance: from 0 to 1, for the lengths of pauses.
    """

    def __init__(
        self,
        tier: Tier,
        config: TierConfig,
        namespace_of: Callable[[str], bytes],
        *,
        slot_bytes: int,
        write_bytes_per_s: float | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.tier = tier
        self.config = config
        self.num_running = 0
        """Calls that may touch host memory."""
        self._namespace_of = namespace_of
        self._namespaces: dict[str, bytes] = {}
        self._slot_bytes = slot_bytes
        self._write_bytes_per_s = write_bytes_per_s
        self._written_until_s = 0.0
        together: list[Breaker] = []
        self._breakers = {
            operation: Breaker(f"Tier {tier.label} ({operation.value})", chance, together)
            for operation in Operation
        }
        self._lanes = {
            Operation.FETCH: asyncio.Semaphore(NUM_FETCHES),
            Operation.SPILL: asyncio.Semaphore(NUM_SPILLS),
        }
        self._late_probes: set[asyncio.Task[list[bool]]] = set()
        self._num_evicted = 0
        self._num_restarts = 0
        self._calls: deque[Call] = deque(maxlen=CALLS_MAX)

    def __repr__(self) -> str:
        return f"<GuardedTier of {self.tier.label}: {list(self._breakers.values())}>"

    @property
    def is_out(self) -> bool:
        """Return whether the circuit breaker is open for reads."""
        reading = (self._breakers[Operation.PROBE], self._breakers[Operation.FETCH])
        return any(breaker.state is not BreakerState.CLOSED for breaker in reading)

    @property
    def is_out_for_writing(self) -> bool:
        """Return whether the circuit breaker is open for writes."""
        return self._breakers[Operation.SPILL].state is not BreakerState.CLOSED

    def namespace(self, generation: str) -> bytes:
        """Return the namespace for the generation of a message."""
        if generation not in self._namespaces:
            if len(self._namespaces) >= NAMESPACES_MAX:
                self._namespaces.clear()
            self._namespaces[generation] = self._namespace_of(generation)
        return self._namespaces[generation]

    def names(self, keys: Sequence[tuple[int, bytes]], generation: str) -> list[Name]:
        """Return the names of blocks by group and hash."""
        namespace = self.namespace(generation)
        return [Name(namespace, group_idx, block_hash) for group_idx, block_hash in keys]

    def take_calls(self) -> list[Call]:
        """Return what calls did since the last time. It is called on vLLM's thread."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    def take_evicted(self) -> int:
        """Return how many objects the tier has evicted since the last time; as `take_calls`."""
        before, self._num_evicted = self._num_evicted, self.tier.num_evicted
        return self._num_evicted - before

    def take_restarts(self) -> int:
        """Return how often the tier's process was started again; as `take_evicted`."""
        before, self._num_restarts = self._num_restarts, self.tier.num_restarts
        return self._num_restarts - before

    async def try_out(self) -> None:
        """Probe until the tier answers, or its circuit breaker has opened and logged why."""
        name = Name(bytes(NAMESPACE_BYTES), 0, bytes(32))
        while self._breakers[Operation.PROBE].state is BreakerState.CLOSED:
            if await self.probe([name]) is not None:
                return

    async def probe(self, names: Sequence[Name]) -> list[bool] | None:
        """Return which objects exist; None after a timeout or with the circuit breaker open.

        A cancelled probe counts as neither success nor failure.
        """
        breaker = self._breakers[Operation.PROBE]
        is_trial = breaker.state is BreakerState.READY
        if self._breakers[Operation.FETCH].state is BreakerState.OPEN or not breaker.admits():
            self._record(Operation.PROBE, 0.0, {LEFT_ALONE: len(names)})
            return None
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        task = loop.create_task(_run(self.tier.probe, names))
        try:
            await asyncio.wait({task}, timeout=self.config.timeout_s)
        except asyncio.CancelledError:
            self._leave(task)
            if is_trial:
                breaker.withdraw()
            raise
        seconds = loop.time() - begin_s
        if not task.done():
            self._leave(task)
            breaker.fail(f"a probe did not finish within {seconds:g} s")
            self._record(Operation.PROBE, seconds, {"timed_out": len(names)})
            return None
        found, problem = _result_of(task, len(names), bool)
        if problem:
            breaker.fail(problem, is_logged=_is_logged(task))
            self._record(Operation.PROBE, seconds, {Result.FAILED.value: len(names)})
            return None
        breaker.succeed()
        self._record(Operation.PROBE, seconds, {"present": sum(found)})
        return found

    async def fetch(self, names: Sequence[Name], slots: Sequence[Any]) -> Sequence[Result] | None:
        """Call `Tier.fetch`; return None if the circuit breaker is open.

        However often it is cancelled, nothing writes to the slots when it returns or raises. A
        call cancelled before any object was done counts as neither success nor failure.
        """
        return await self._move(Operation.FETCH, self.tier.fetch, names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[Any]) -> Sequence[Result] | None:
        """Call `Tier.spill` as `fetch` does `Tier.fetch`."""
        if not self.is_out_for_writing:
            await self._wait_to_write(len(names) * self._slot_bytes)
        return await self._move(Operation.SPILL, self.tier.spill, names, slots)

    async def close(self) -> None:
        """Close the tier, or abandon it if that takes too long."""
        closing = asyncio.get_running_loop().create_task(_run(self.tier.close))
        waited_for = {closing, *self._late_probes}
        for task in self._late_probes:
            task.cancel()
        await asyncio.wait(waited_for, timeout=CLOSE_TIMEOUT_S)
        if not closing.done():
            closing.cancel()
            logger.warning(
                "Tier %s did not close within %g s and is abandoned. Fix: if this recurs, check "
                "for a hung device or mount.",
                *(self.tier.label, CLOSE_TIMEOUT_S),
            )
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            logger.warning("Tier %s did not close cleanly: %r", self.tier.label, error)

    # ---- inside --------------------------------------------------------------------------------

    async def _move(
        self,
        operation: Operation,
        call: Callable[[Sequence[Name], Sequence[Any]], Coroutine[Any, Any, list[Result]]],
        names: Sequence[Name],
        slots: Sequence[Any],
    ) -> Sequence[Result] | None:
        lane, breaker = self._lanes[operation], self._breakers[operation]
        await lane.acquire()
        with contextlib.ExitStack() as turn:
            turn.callback(lane.release)
            if not breaker.admits():
                self._record(operation, 0.0, {LEFT_ALONE: len(names)})
                return None
            is_trial = breaker.state is BreakerState.TRYING
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            task = loop.create_task(_run(call, names, slots))
            self.num_running += 1
            is_late, is_hung = await self._outlast(task, operation, len(names), turn)
            self.num_running -= 1
        results, problem = _result_of(task, len(names), Result)
        results = results or [Result.FAILED] * len(names)
        seconds = loop.time() - begin_s
        is_logged = _is_logged(task)
        counts = Counter(results)
        if num_refused := counts.pop(Result.REFUSED, 0):
            counts[Result.FAILED] += num_refused
        num_moved = counts[Result.DONE]
        if not is_hung:  # else it has been judged
            if not problem and not num_moved + counts[Result.PRESENT]:
                if counts[Result.FAILED]:
                    problem = f"a {operation.value} failed"
                    is_logged = True  # by the store
                elif counts[Result.STILL_FULL]:
                    problem = "there was no room"
                elif is_late:
                    problem = f"a {operation.value} did not start within {seconds:g} s"
            if problem:
                breaker.fail(problem, is_logged=is_logged)
            elif counts[Result.CANCELLED] < len(names):
                breaker.succeed()
            elif is_trial:
                breaker.withdraw()
        outcome = {result.value: count for result, count in counts.items()}
        if still_full := outcome.pop(Result.STILL_FULL.value, 0):
            outcome[Result.FULL.value] = counts[Result.FULL] + still_full
        if cancelled := outcome.pop(Result.CANCELLED.value, 0):
            outcome["timed_out" if is_late else Result.CANCELLED.value] = cancelled
        self._record(operation, seconds, outcome, num_moved * self._slot_bytes)
        return results

    async def _outlast(
        self,
        task: asyncio.Task[Any],
        operation: Operation,
        num_objects: int,
        turn: contextlib.ExitStack,
    ) -> tuple[bool, bool]:
        """Wait for a call to return, however long that takes; return whether it was late, and hung.

        It is cancelled at its deadline, or with the caller. A hung call loses its turn.
        """
        late_s = asyncio.get_running_loop().time() + self.config.timeout_s
        if await outlast({task}, task.cancel, late_s):
            return False, False
        task.cancel()
        if await outlast({task}, task.cancel, late_s + GRACE_S):
            return True, False
        turn.close()  # one that hangs must not hold up all others
        self._breakers[operation].fail(f"a {operation.value} hangs")
        logger.error(
            "A %s of %d objects in tier %s has not returned %g s after its deadline. Its host "
            "slots stay leased until it does. Check for a hung device or mount (dmesg), and "
            "restart the server if it does not recover.",
            *(operation.value, num_objects, self.tier.label, GRACE_S),
        )
        await outlast({task}, task.cancel)
        return True, True

    async def _wait_to_write(self, size_bytes: int) -> None:
        if self._write_bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._written_until_s)
        self._written_until_s = begin_s + size_bytes / self._write_bytes_per_s
        await asyncio.sleep(begin_s - now_s)

    def _leave(self, probe: asyncio.Task[list[bool]]) -> None:
        """Let a probe end by itself: it touches no slot."""
        probe.cancel()
        self._late_probes.add(probe)

        def forget(_: object) -> None:
            self._late_probes.discard(probe)
            if not probe.cancelled():
                probe.exception()  # seen, so that asyncio does not complain

        probe.add_done_callback(forget)

    def _record(
        self, operation: Operation, seconds: float, results: dict[str, int], size_bytes: int = 0
    ) -> None:
        self._calls.append(Call(operation, seconds, results, size_bytes))


async def _run(call: Callable[..., Any], *args: object) -> Any:
    """Call a method of a tier; an error before its coroutine exists is raised like any other."""
    return await call(*args)


def _is_logged(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), LoggedError)


def _result_of(task: asyncio.Task[Any], num_names: int, kind: type) -> tuple[list[Any], str]:
    """Return the results of a task that has ended, one for each name, or none and the problem."""
    if task.cancelled():
        return [], "it was cancelled and returned no result"
    if (error := task.exception()) is not None:
        return [], reason_of(error)
    found = task.result()
    if not isinstance(found, list) or len(found) != num_names:
        return [], f"it did not return one result for each of the {num_names} objects"
    if not all(isinstance(each, kind) for each in found):
        return [], "its result is invalid"
    return found, ""
