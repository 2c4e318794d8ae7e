"""A bucket of an object store as a tier: S3 and what speaks like it, Google's and Azure's.

obstore sends the requests, on threads of its own. An object is put in one request, so that it is
there whole or not at all. What is written is copied from the slot before; what is read is copied
into it when all has come, in the loop's thread. Nothing is tried a second time.

A bucket is trusted as far as its certificate says who it is: obstore follows redirects, and reads
the text of an error whole, however long that is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.batch import Batch, Calls
from safe_offload.tiers.objects.search import find_present
from safe_offload.tiers.objects.store import (
    Problem,
    StoreError,
    fix_for,
    open_store,
    problem_of,
    shown,
)
from safe_offload.tiers.rare_log import RareLog
from safe_offload.tiers.seal import PLAIN, Seal

logger = logging.getLogger(f"vllm.{__name__}")

LEAVE_S: Final = 0.25
"""So long the requests of a batch that is given up may go on; then they are given up too."""

ABSENT_S: Final = 60.0
"""So long an object is not offered that was not there when it was fetched."""

_NAMES_MAX: Final = 1 << 16

_ABSENT: Final = (Problem.NOT_FOUND,)
_NEW: Final = (Problem.EXISTS, Problem.UNSUPPORTED)

T = TypeVar("T")
Work = Callable[[Name, Buffers], Awaitable[Result]]
DoNext = Callable[[], Awaitable[bool]]
Connection = Callable[[int, DoNext], Coroutine[Any, Any, None]]


class ObjectTier:
    """See `Tier`.

    Args:
        config: of the tier; the store is not asked for anything before the tier is first used.

    Raises:
        ConfigError: see `open_store`.
    """

    def __init__(
        self,
        config: TierConfig,
        facts: Mapping[str, object] | None = None,
        seal: Seal = PLAIN,
    ) -> None:
        self.label = config.location.label
        self.used_bytes = -1
        self.num_evicted = 0
        self._scheme = config.location.scheme
        self._store = open_store(config)
        self._facts = {} if facts is None else facts
        self._seal = seal
        self._log = RareLog(self.label)
        self._connections = _Connections(config.num_connections)
        self._looks = asyncio.Semaphore(config.num_connections)
        self._knows_create = True
        # Objects that were there when they were last read, written or asked for.
        self._seen: dict[Name, None] = {}
        # Objects that are not offered, and until when: for ever what cannot be used or deleted.
        self._withheld_until_s: dict[Name, float] = {}
        self._described: set[bytes] = set()
        self._calls = Calls()
        self._looking: set[asyncio.Task[bool]] = set()

    def __repr__(self) -> str:
        return f"<ObjectTier {self.label}>"

    # ---- the protocol -------------------------------------------------------------------------

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        """See `Tier.probe`; asks at most `REQUESTS_MAX` times."""
        unknown = [name for name in names if name not in self._seen]
        found = dict(zip(unknown, await find_present(unknown, self._ask), strict=True))
        return [found.get(name, True) and not self._is_withheld(name) for name in names]

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(self._read, names, slots, self._connections.for_fetch)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(self._write, names, slots, self._connections.for_spill)

    async def close(self) -> None:
        for task in self._looking:
            task.cancel()
        await self._calls.close()
        self._store = None

    async def _run(
        self, work: Work, names: Sequence[Name], slots: Sequence[Buffers], connection: Connection
    ) -> list[Result]:
        """Do the objects of a batch some at a time, until it is given up or too many fail."""
        batch, num_failed = Batch(names, slots), 0
        if self._calls.is_closed:
            return batch.results
        loop = asyncio.get_running_loop()
        leaving: asyncio.TimerHandle | None = None

        async def do_next() -> bool:
            nonlocal num_failed
            index = next(batch.take_left(), None)
            if index is None:
                return False
            result = batch.results[index] = await work(names[index], slots[index])
            num_failed += result is Result.FAILED
            if num_failed > self._connections.number:
                batch.settle(batch.take_left(), Result.FAILED)
            return True

        def give_up() -> None:
            nonlocal leaving
            batch.left.clear()
            leaving = leaving or loop.call_later(LEAVE_S, leave)

        def leave() -> None:
            for worker in workers:
                worker.cancel()

        num_workers = min(self._connections.number, len(names))
        workers = [asyncio.ensure_future(connection(n, do_next)) for n in range(num_workers)]
        await self._calls.outlast(workers, give_up)
        if leaving is not None:
            leaving.cancel()
        try:
            for worker in workers:
                if not worker.cancelled():
                    worker.result()
        except Exception:
            logger.exception("Unexpected error in tier %s, which stays in use", self.label)
        return batch.results

    # ---- one object ---------------------------------------------------------------------------

    async def _read(self, name: Name, slot: Buffers) -> Result:
        header = bytearray(naming.HEADER_BYTES)
        reading = self._get(_path_of(name), (memoryview(header), *slot))
        try:
            fits = await self._request("read", reading, _ABSENT)
        except StoreError as error:
            if error.problem is not Problem.NOT_FOUND:
                return Result.FAILED
            self._withhold(name, time.monotonic() + ABSENT_S)
            return Result.ABSENT
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
        self._log.bad_object(result, _path_of(name))
        try:
            await self._request("delete", self._store.delete_async(_path_of(name)))
        except StoreError:
            self._withhold(name, math.inf)
        return result

    async def _write(self, name: Name, slot: Buffers) -> Result:
        if name.namespace not in self._described:
            await self._describe(name.namespace)
        is_bad = self._withheld_until_s.get(name) == math.inf
        if not (is_bad or self._knows_create) and (await self._ask([name]))[0]:
            return Result.PRESENT
        data = b"".join((await self._seal.header_async(name, slot), *slot))
        try:
            result = await self._put_new(name, data, may_replace=is_bad)
        except StoreError as error:
            return Result.FULL if error.problem is Problem.FULL else Result.FAILED
        self._note_seen(name)
        return result

    async def _put_new(self, name: Name, data: bytes, *, may_replace: bool) -> Result:
        """Put an object if there is none, as far as the store knows how."""
        if self._knows_create and not may_replace:
            try:
                await self._request("write", self._put(_path_of(name), data, "create"), _NEW)
                return Result.DONE
            except StoreError as error:
                if error.problem is Problem.EXISTS:
                    return Result.PRESENT
                if error.problem is not Problem.UNSUPPORTED:
                    raise
                self._knows_create = False
        await self._request("write", self._put(_path_of(name), data, "overwrite"))
        return Result.DONE

    async def _describe(self, namespace: bytes) -> None:
        """Write down what a namespace is, beside its objects."""
        if len(self._described) >= naming.NAMESPACES_MAX:
            self._described.clear()
        self._described.add(namespace)
        path = f"{naming.namespace_folder(namespace)}/{naming.DESCRIPTION_FILE}"
        data = naming.description(namespace, self._facts)
        try:
            await self._request("write", self._put(path, data, "overwrite"))
        except StoreError:
            self._described.discard(namespace)

    # ---- requests -----------------------------------------------------------------------------

    async def _ask(self, names: Sequence[Name]) -> list[bool]:
        """Return of each name whether the store has it, with a request for each.

        Raises:
            OSError: it cannot be asked.
        """
        if self._calls.is_closed:
            raise OSError(errno.ESHUTDOWN, "the tier is closed")
        asking = [asyncio.ensure_future(self._look(name)) for name in names]
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

    async def _look(self, name: Name) -> bool:
        if self._withheld_until_s.get(name) == math.inf:
            return False
        async with self._looks:
            try:
                await self._request("probe", self._store.head_async(_path_of(name)), _ABSENT)
            except StoreError as error:
                if error.problem is Problem.NOT_FOUND:
                    return False
                raise OSError(errno.EIO, error.problem.value) from None
        self._note_seen(name)
        return True

    async def _get(self, path: str, into: Sequence[memoryview]) -> bool:
        """Read an object; return whether it is as long as the memory that it is read into."""
        size_bytes = sum(buffer.nbytes for buffer in into)
        found = await self._store.get_async(path)
        if found.meta["size"] != size_bytes:
            return False
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in found.stream(size_bytes):
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > size_bytes:
                return False
        if num_bytes != size_bytes:
            return False
        data = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        for buffer in into:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
        return True

    async def _put(self, path: str, data: bytes, mode: str) -> None:
        await self._store.put_async(path, data, use_multipart=False, mode=mode)

    async def _request(
        self, what: str, request: Awaitable[T], answers: Sequence[Problem] = ()
    ) -> T:
        """Return what a request brings.

        Args:
            answers: problems that are not worth a line in the log.

        Raises:
            StoreError: the problem that it met.
        """
        try:
            return await request
        except Exception as error:
            problem = problem_of(error)
            if problem is Problem.NOT_FOUND and what == "write":
                problem = Problem.NO_BUCKET
            if problem not in answers and self._log.is_due((what, problem)):
                logger.warning(
                    "Tier %s failed to %s: %s (%s). %s",
                    *(self.label, what, problem.value, shown(error)),
                    fix_for(problem, self._scheme),
                )
            raise StoreError(problem) from None

    # ---- what is known -------------------------------------------------------------------------

    def _note_seen(self, name: Name) -> None:
        self._withheld_until_s.pop(name, None)
        self._seen[name] = None
        _forget_first(self._seen)

    def _withhold(self, name: Name, until_s: float) -> None:
        self._seen.pop(name, None)
        self._withheld_until_s[name] = until_s
        _forget_first(self._withheld_until_s)

    def _is_withheld(self, name: Name) -> bool:
        until_s = self._withheld_until_s.get(name)
        return until_s is not None and time.monotonic() < until_s


class _Connections:
    """Bounds the requests at a time of fetches, and of spills.

    A request waits for its blocks in the order of its tokens: so a fetch that came before another
    has all connections before it. While there are fetches, spills go on with a quarter as many.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._fetches = asyncio.Semaphore(number)
        self._spills = asyncio.Semaphore(number)
        self._num_fetching = 0

    async def for_fetch(self, _worker_idx: int, work: DoNext) -> None:
        """Do one object after another."""
        self._num_fetching += 1
        try:
            async with self._fetches:
                while await work():
                    pass
        finally:
            self._num_fetching -= 1

    async def for_spill(self, worker_idx: int, work: DoNext) -> None:
        """Do one object after another; leave them to the first workers when there are fetches."""
        async with self._spills:
            while worker_idx < max(1, self.number // 4) or not self._num_fetching:
                if not await work():
                    return


def _path_of(name: Name) -> str:
    return "/".join((naming.namespace_folder(name.namespace), *naming.path_of(name)))


def _forget_first(names: dict[Name, Any]) -> None:
    """Keep at most `_NAMES_MAX`."""
    if len(names) > _NAMES_MAX:
        del names[next(iter(names))]
