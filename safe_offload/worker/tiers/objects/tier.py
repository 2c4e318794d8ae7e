"""A bucket of an object store as a tier: S3 and what speaks like it, Google's and Azure's.

An object is put in one request, so that it is there whole or not at all. What is written is copied
from the slot before. Nothing is tried a second time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from safe_offload.tier_config import TierConfig
from safe_offload.worker.tiers import naming
from safe_offload.worker.tiers.base import Buffers, Name, Result
from safe_offload.worker.tiers.objects.library import LibraryRequests
from safe_offload.worker.tiers.objects.requests import Method, Requests
from safe_offload.worker.tiers.objects.search import find_present
from safe_offload.worker.tiers.objects.signed import SignedRequests, plain_url
from safe_offload.worker.tiers.objects.store import (
    Problem,
    fix_for,
    open_store,
    problem_of,
    shown,
)
from safe_offload.worker.tiers.objects.turns import Rank, Turns
from safe_offload.worker.tiers.rare_log import RareLog
from safe_offload.worker.tiers.seal import PLAIN, Seal

logger = logging.getLogger(f"vllm.{__name__}")

LEAVE_S: Final = 0.25
"""So long the requests of a batch that is given up may go on; then they are given up too."""

ABSENT_S: Final = 60.0
"""So long an object is not offered that was not there when it was fetched."""

_NAMES_MAX: Final = 1 << 16

_ABSENT: Final = (Problem.NOT_FOUND,)
_WORDS: Final[dict[Method, str]] = {
    "GET": "read",
    "HEAD": "ask",
    "PUT": "write",
    "DELETE": "delete",
}

Work = Callable[[Name, Buffers, str], Awaitable[Result]]


class ObjectTier:
    """See `Tier`.

    Args:
        config: of the tier; the store is not asked for anything before the tier is first used.
        facts: what its namespaces are made of (naming.py), written down beside the objects.
        seal: makes and checks the headers of objects.
        requests: of the bucket, where they are not to be opened here.

    Raises:
        ConfigError: see `open_store`.
    """

    def __init__(
        self,
        config: TierConfig,
        facts: Mapping[str, object] | None = None,
        seal: Seal = PLAIN,
        requests: Requests | None = None,
    ) -> None:
        self.label = config.location.label
        self.used_bytes = -1
        self.num_evicted = 0
        self._scheme = config.location.scheme
        self._requests = requests or open_requests(config)
        self._facts = {} if facts is None else facts
        self._seal = seal
        self._log = RareLog()
        self._num_connections = config.num_connections
        self._moves = Turns(config.num_connections)
        self._num_batches = 0
        self._looks = asyncio.Semaphore(config.num_connections)
        self._knows_create = True
        # Objects that were there when they were last read, written or asked for.
        self._seen: dict[Name, None] = {}
        # Objects that are not offered, and until when: for ever what cannot be used or deleted.
        self._withheld_until_s: dict[Name, float] = {}
        self._described: set[bytes] = set()
        self._batches: set[_Batch] = set()
        self._looking: set[asyncio.Task[bool]] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ObjectTier {self.label}>"

    # ---- the protocol -------------------------------------------------------------------------

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        """See `Tier.probe`; asks at most `REQUESTS_MAX` times."""
        unknown = [name for name in names if name not in self._seen]
        found = dict(zip(unknown, await find_present(unknown, self._ask), strict=True))
        return [found.get(name, True) and not self._is_withheld(name) for name in names]

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        """See `Tier.fetch`."""
        return await self._run("GET", self._read, names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        """See `Tier.spill`."""
        return await self._run("PUT", self._write, names, slots)

    async def close(self) -> None:
        """See `Tier.close`."""
        self._is_closed = True
        for batch in self._batches:
            batch.give_up()
        for task in self._looking:
            task.cancel()
        while self._batches:
            await asyncio.wait([worker for batch in self._batches for worker in batch.workers])
            await asyncio.sleep(0)  # whoever waits for them goes on
        self._requests.close()
        await asyncio.sleep(0)  # connections are closed

    async def _run(
        self, method: Method, work: Work, names: Sequence[Name], slots: Sequence[Buffers]
    ) -> list[Result]:
        batch = _Batch(names, slots, self._num_connections)
        if self._is_closed or not names:
            return batch.results
        self._batches.add(batch)
        self._num_batches += 1
        rank = Rank(method == "PUT", self._num_batches)
        try:
            await batch.run(self._moves, rank, self._prepare(method, batch), work)
        except Exception:
            logger.exception("Tier %s met an error of its own; it goes on", self.label)
        finally:
            self._batches.discard(batch)
        return batch.results

    async def _prepare(self, method: Method, batch: _Batch) -> None:
        tickets = await self._tickets(method, [_path_of(name) for name in batch.names])
        if isinstance(tickets, Problem):
            batch.fail()
        else:
            batch.tickets = tickets

    # ---- one object ---------------------------------------------------------------------------

    async def _read(self, name: Name, slot: Buffers, ticket: str) -> Result:
        header = bytearray(naming.HEADER_BYTES)
        into = (memoryview(header), *slot)
        fits = await self._request("read", self._requests.get(ticket, into), _ABSENT)
        if fits is Problem.NOT_FOUND:
            self._withhold(name, time.monotonic() + ABSENT_S)
            return Result.ABSENT
        if isinstance(fits, Problem):
            return Result.FAILED
        if not fits:
            return await self._reject(name, Result.CORRUPT)
        result = await self._seal.judge_async(bytes(header), name, slot)
        if result is not Result.DONE:
            return await self._reject(name, result)
        self._note_seen(name)
        return result

    async def _reject(self, name: Name, result: Result) -> Result:
        """Delete an object that cannot be used; return what is wrong with it."""
        self._seen.pop(name, None)
        if self._log.is_due(result):
            logger.warning(
                "An object of tier %s cannot be used, it is %s: %s",
                *(self.label, result.value, _path_of(name)),
            )
        deleted = await self._delete(_path_of(name))
        if isinstance(deleted, Problem):
            self._withhold(name, math.inf)
        return result

    async def _write(self, name: Name, slot: Buffers, ticket: str) -> Result:
        if name.namespace not in self._described:
            await self._describe(name.namespace)
        is_bad = self._withheld_until_s.get(name) == math.inf
        if not (is_bad or self._knows_create) and (await self._ask([name]))[0]:
            return Result.PRESENT
        only_new = self._knows_create and not is_bad
        data = (await self._seal.header_async(name, slot), *map(bytes, slot))
        answer = await self._put(ticket, data, only_new=only_new)
        if answer is Problem.UNSUPPORTED and only_new:
            self._knows_create = False
            answer = await self._put(ticket, data, only_new=False)
        if answer is Problem.FULL:
            return Result.FULL
        if isinstance(answer, Problem) and answer is not Problem.EXISTS:
            return Result.FAILED
        self._note_seen(name)
        return Result.PRESENT if answer is Problem.EXISTS else Result.DONE

    async def _describe(self, namespace: bytes) -> None:
        """Write down what a namespace is, beside its objects."""
        self._described.add(namespace)
        path = f"{naming.namespace_folder(namespace)}/{naming.DESCRIPTION_FILE}"
        answer = await self._tickets("PUT", [path])
        if not isinstance(answer, Problem):
            data = naming.description(namespace, self._facts)
            answer = await self._put(answer[0], (data,), only_new=False)
        if isinstance(answer, Problem):
            self._described.discard(namespace)

    # ---- requests -----------------------------------------------------------------------------

    async def _ask(self, names: Sequence[Name]) -> list[bool]:
        """Return of each name whether the store has it, with a request for each.

        Raises:
            OSError: it cannot be asked.
        """
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "the tier is closed")
        tickets = await self._tickets("HEAD", [_path_of(name) for name in names])
        if isinstance(tickets, Problem):
            raise OSError(errno.EIO, tickets.value)
        asking = [
            asyncio.ensure_future(self._look(name, ticket))
            for name, ticket in zip(names, tickets, strict=True)
        ]
        self._looking.update(asking)
        try:
            return await asyncio.gather(*asking)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise OSError(errno.ESHUTDOWN, "the tier is closed") from None
        finally:
            for task in asking:
                task.cancel()
            self._looking.difference_update(asking)

    async def _look(self, name: Name, ticket: str) -> bool:
        if self._withheld_until_s.get(name) == math.inf:
            return False
        async with self._looks:
            found = await self._request("ask", self._requests.head(ticket), _ABSENT)
        if found is Problem.NOT_FOUND:
            return False
        if isinstance(found, Problem):
            raise OSError(errno.EIO, found.value)
        self._note_seen(name)
        return True

    async def _put(self, ticket: str, data: Sequence[bytes], *, only_new: bool) -> Any:
        answers = (Problem.EXISTS, Problem.UNSUPPORTED) if only_new else ()
        putting = self._requests.put(ticket, data, only_new=only_new)
        return await self._request("write", putting, answers)

    async def _delete(self, path: str) -> Any:
        tickets = await self._tickets("DELETE", [path])
        if isinstance(tickets, Problem):
            return tickets
        return await self._request("delete", self._requests.delete(tickets[0]), _ABSENT)

    async def _tickets(self, method: Method, paths: Sequence[str]) -> Any:
        """Return what requests are made with, or the problem that there was."""
        try:
            return await self._requests.tickets(method, paths)
        except Exception as error:  # of whoever gives credentials: it says nothing of an object
            return self._note_problem(_WORDS[method], Problem.OTHER, error)

    async def _request(
        self, what: str, request: Awaitable[Any], answers: Sequence[Problem] = ()
    ) -> Any:
        """Return what a request brings, or the problem that it met; `answers` are none to log."""
        try:
            return await request
        except Exception as error:
            problem = problem_of(error)
            if what == "write" and problem is Problem.NOT_FOUND:
                problem = Problem.NO_BUCKET
            if problem in answers:
                return problem
            return self._note_problem(what, problem, error)

    def _note_problem(self, what: str, problem: Problem, error: Exception) -> Problem:
        if self._log.is_due((what, problem)):
            logger.warning(
                "Tier %s failed to %s: %s (%s). %s",
                *(self.label, what, problem.value, shown(error)),
                fix_for(problem, self._scheme),
            )
        return problem

    # ---- what is known -------------------------------------------------------------------------

    def _note_seen(self, name: Name) -> None:
        self._withheld_until_s.pop(name, None)
        self._seen[name] = None
        if len(self._seen) > _NAMES_MAX:
            del self._seen[next(iter(self._seen))]

    def _withhold(self, name: Name, until_s: float) -> None:
        self._seen.pop(name, None)
        self._withheld_until_s[name] = until_s
        if len(self._withheld_until_s) > _NAMES_MAX:
            del self._withheld_until_s[next(iter(self._withheld_until_s))]

    def _is_withheld(self, name: Name) -> bool:
        until_s = self._withheld_until_s.get(name)
        return until_s is not None and time.monotonic() < until_s


def open_requests(config: TierConfig) -> Requests:
    """Return how requests of a tier are sent; nothing is asked of the store yet.

    Raises:
        ConfigError: see `open_store`.
    """
    store = open_store(config)
    url = plain_url(config) if config.location.scheme == "s3" else None
    if url is None:
        return LibraryRequests(store)
    return SignedRequests(store, url, config.timeout_s)


class _Batch:
    """Objects that are done some at a time, until it is given up or too many have failed.

    Args:
        num_workers: so many at a time.
    """

    def __init__(self, names: Sequence[Name], slots: Sequence[Buffers], num_workers: int) -> None:
        self.names = names
        self.results = [Result.CANCELLED] * len(names)
        self.tickets: Sequence[str] = ()
        self.workers: list[asyncio.Task[None]] = []
        self._slots = slots
        self._left = deque(range(len(names)))
        self._num_workers = num_workers
        self._num_failed = 0
        self._leaving: asyncio.TimerHandle | None = None

    async def run(
        self, moves: Turns, rank: Rank, prepare: Coroutine[Any, Any, None], work: Work
    ) -> None:
        """Do all; however often it is cancelled, nothing goes on when it returns.

        Args:
            prepare: runs first, and sets `tickets`.

        Raises:
            Exception: of `work`.
        """
        await self._outlast([prepare])
        count = min(self._num_workers, len(self._left))
        await self._outlast([self._work_off(moves, rank, work) for _ in range(count)])

    async def _outlast(self, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        self.workers = [asyncio.ensure_future(each) for each in work]
        while not all(worker.done() for worker in self.workers):
            try:
                await asyncio.wait(self.workers)
            except asyncio.CancelledError:
                self.give_up()
        if self._leaving is not None:
            self._leaving.cancel()
        errors = [worker.exception() for worker in self.workers if not worker.cancelled()]
        for error in filter(None, errors):
            raise error

    def fail(self) -> None:
        """Begin no more objects: those that are left have failed."""
        for index in self._left:
            self.results[index] = Result.FAILED
        self._left.clear()

    def give_up(self) -> None:
        """Begin no more objects, and soon give up those that have been begun."""
        self._left.clear()
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().call_later(LEAVE_S, self._leave)

    def _leave(self) -> None:
        for worker in self.workers:
            worker.cancel()

    async def _work_off(self, moves: Turns, rank: Rank, work: Work) -> None:
        while self._left:
            await moves.take(rank)
            try:
                while self._left:
                    await self._do_next(work)
                    if moves.is_wanted(rank):
                        break
            finally:
                moves.give(rank)

    async def _do_next(self, work: Work) -> None:
        index = self._left.popleft()
        result = await work(self.names[index], self._slots[index], self.tickets[index])
        self.results[index] = result
        self._num_failed += result is Result.FAILED
        if self._num_failed > self._num_workers:
            self.fail()


def _path_of(name: Name) -> str:
    return "/".join((naming.namespace_folder(name.namespace), *naming.path_of(name)))
