"""A bucket of an object store: S3 and what speaks like it, Google's and Azure's.

obstore sends the requests, on threads of its own. One request puts an object, so it exists whole or
not at all. A write copies the slot first; a read is copied into it when all bytes have arrived, on
the loop's thread. There are no retries.

A bucket is trusted by its certificate: obstore follows redirects, and reads the text of an error
however long it is.

A store reports when an object was written, not when it was last read; that is used instead.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from safe_offload.config.tiers import BucketConfig
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.batch import Batch
from safe_offload.tiers.objects.bucket import Problem, StoreError, open_store
from safe_offload.tiers.objects.search import find_present
from safe_offload.tiers.rare_log import RareLog
from safe_offload.tiers.store import LISTED_MAX, PAGE_ITEMS, Item, Store, item_at, listed
from safe_offload.tiers.waiting import outlast

logger = logging.getLogger(f"vllm.{__name__}")

LEAVE_S: Final = 0.25
"""How long the requests of a cancelled batch may go on before they are cancelled too."""

ABSENT_S: Final = 60.0
"""How long an object is not offered that was absent when it was fetched."""

_NAMES_MAX: Final = 1 << 16
_SKIPPING: Final = ("s3", "gs")
"""Schemes of stores that list names in order, from any name on."""

_ABSENT: Final = (Problem.NOT_FOUND,)
_REFUSALS: Final = {Problem.FULL: Result.FULL, Problem.DENIED: Result.REFUSED}
_NEW: Final = (Problem.EXISTS, Problem.UNSUPPORTED)

T = TypeVar("T")
Work = Callable[[Batch, int], Awaitable[Result]]
DoNext = Callable[[], Awaitable[bool]]
Connection = Callable[[int, DoNext], Coroutine[Any, Any, None]]


class BucketStore(Store):
    """See `Store`; raises as `open_store`."""

    use = "WRITTEN"
    place_id = "tiers.bucket"

    def __init__(self, config: BucketConfig, slot_bytes: int = 0) -> None:
        super().__init__(config, slot_bytes)
        self._scheme = config.location.scheme
        self._store = open_store(config)
        self.log = _Log(self.label)
        self._connections = _Connections(config.num_connections)
        self._looks = asyncio.Semaphore(config.num_connections)
        self._knows_create = True
        # Objects that existed when they were last read, written or queried.
        self._seen: dict[Name, None] = {}
        # Objects that were not there when they were fetched, and until when they are not offered.
        self._absent_until_s: dict[Name, float] = {}
        self._looking: set[asyncio.Task[bool]] = set()

    # ---- engines ------------------------------------------------------------------------------

    async def has(self, names: Sequence[Name]) -> list[bool]:
        """See `Store.has`; sends at most `REQUESTS_MAX` requests."""
        unknown = [name for name in names if name not in self._seen]
        found = dict(zip(unknown, await find_present(unknown, self._ask), strict=True))
        now_s = time.monotonic()
        return [
            found.get(name, True) and self._absent_until_s.get(name, 0.0) <= now_s for name in names
        ]

    async def get(self, batch: Batch) -> None:
        await self._run(self._read, batch, self._connections.for_fetch)

    async def put(self, batch: Batch) -> None:
        await self._run(self._write, batch, self._connections.for_spill)

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        await asyncio.gather(*map(self._remove, keys))
        return [True] * len(keys)

    async def _remove(self, key: str) -> None:
        item = item_at(key, 0, 0.0)
        if item is not None and item.name is not None:
            self._seen.pop(item.name, None)
        async with self._looks:
            try:
                await self._request("delete", self._store.delete_async(key), _ABSENT)
            except StoreError as error:
                if error.kind is not Problem.NOT_FOUND:
                    raise

    async def describe(self, namespace: bytes, text: bytes) -> float:
        path = self.description_key(naming.namespace_folder(namespace))
        await self._request("write", self._put(path, text, "overwrite"))
        return float("inf")

    async def close(self) -> None:
        for task in self._looking:
            task.cancel()
        self._store = None

    async def _run(self, work: Work, batch: Batch, connection: Connection) -> None:
        """Work off a batch, until it is cancelled or too many objects fail."""
        num_failed = 0
        loop = asyncio.get_running_loop()
        leaving: asyncio.TimerHandle | None = None

        async def do_next() -> bool:
            nonlocal num_failed
            index = next(batch.take_left(), None)
            if index is None:
                return False
            result = batch.results[index] = await work(batch, index)
            num_failed += result in (Result.FAILED, Result.REFUSED)
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

        num_workers = min(self._connections.number, len(batch.left))
        workers = [asyncio.ensure_future(connection(n, do_next)) for n in range(num_workers)]
        await outlast(workers, give_up)
        if leaving is not None:
            leaving.cancel()
        for worker in workers:
            if not worker.cancelled():
                worker.result()

    # ---- one object ---------------------------------------------------------------------------

    async def _read(self, batch: Batch, index: int) -> Result:
        name, size_bytes = batch.names[index], batch.size_of(index)
        try:
            reading = self._get(self.key_of(name), size_bytes)
            data = await self._request("read", reading, _ABSENT)
        except StoreError as error:
            if error.kind is not Problem.NOT_FOUND:
                return Result.FAILED
            self._seen.pop(name, None)
            self._absent_until_s[name] = time.monotonic() + ABSENT_S
            _forget_first(self._absent_until_s)
            return Result.ABSENT
        result = await batch.take(index, data)
        if result is Result.DONE:
            self._remember(name)
        return result

    async def _write(self, batch: Batch, index: int) -> Result:
        name, is_bad = batch.names[index], batch.is_bad(index)
        if not (is_bad or self._knows_create) and (await self._ask([name]))[0]:
            return Result.PRESENT
        data = await batch.whole(index)
        try:
            result = await self._put_new(self.key_of(name), data, may_replace=is_bad)
        except StoreError as error:
            return _REFUSALS.get(error.kind, Result.FAILED)
        self._remember(name)
        return result

    async def _put_new(self, path: str, data: bytes, *, may_replace: bool) -> Result:
        """Put an object if there is none, if the store supports that."""
        if self._knows_create and not may_replace:
            try:
                await self._request("write", self._put(path, data, "create"), _NEW)
                return Result.DONE
            except StoreError as error:
                if error.kind is Problem.EXISTS:
                    return Result.PRESENT
                if error.kind is not Problem.UNSUPPORTED:
                    raise
                self._knows_create = False
        await self._request("write", self._put(path, data, "overwrite"))
        return Result.DONE

    # ---- operators ----------------------------------------------------------------------------

    async def namespaces(self) -> list[str]:
        """See `Store.namespaces`; a listing by folders would come in one answer of any length."""
        import obstore

        found, left = set[str](), obstore.list(self._store, chunk_size=PAGE_ITEMS)
        while len(found) < LISTED_MAX and (page := await self._request("list", next_page(left))):
            paths = [meta["path"] for meta in page]
            found.update(listed(path.partition("/")[0] for path in paths))
            first, last = (path.partition("/")[0] for path in (paths[0], paths[-1]))
            if first == last and self._scheme in _SKIPPING and paths == sorted(paths):
                left = obstore.list(self._store, offset=f"{last}0", chunk_size=PAGE_ITEMS)
        return listed(found)

    async def walk(self, namespace: str = "") -> AsyncIterator[list[Item]]:
        """See `Store.walk`; a thousand in each request."""
        import obstore

        pages = obstore.list(self._store, namespace or None, chunk_size=PAGE_ITEMS)
        while page := await self._request("list", next_page(pages)):
            yield list(filter(None, map(_item_of, page)))

    async def read(self, key: str, start: int, length: int) -> bytes:
        reading = self._store.get_range_async(key, start=start, length=length)
        try:
            return bytes(await self._request("read", reading, _ABSENT))
        except StoreError as error:
            if error.kind is Problem.NOT_FOUND:
                raise FileNotFoundError(errno.ENOENT, error.kind.value) from None
            raise

    # ---- requests -----------------------------------------------------------------------------

    async def _ask(self, names: Sequence[Name]) -> list[bool]:
        """Return whether the store has each name, by one request for each; OSError if one fails."""
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
        async with self._looks:
            try:
                asking = self._store.head_async(self.key_of(name))
                await self._request("probe", asking, _ABSENT)
            except StoreError as error:
                if error.kind is Problem.NOT_FOUND:
                    return False
                raise
        self._remember(name)
        return True

    async def _get(self, path: str, size_bytes: int) -> bytes | memoryview:
        """Return an object; nothing if it has another length."""
        found = await self._store.get_async(path)
        if found.meta["size"] != size_bytes:
            return b""
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in found.stream(size_bytes):
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > size_bytes:
                return b""
        return memoryview(chunks[0]) if len(chunks) == 1 else b"".join(chunks)

    async def _put(self, path: str, data: bytes, mode: str) -> None:
        await self._store.put_async(path, data, use_multipart=False, mode=mode)

    async def _request(
        self, what: str, request: Awaitable[T], answers: Sequence[Problem] = ()
    ) -> T:
        """Return the result, or raise a StoreError, logged unless its kind is in `answers`."""
        absent = Problem.NO_BUCKET if what in ("write", "list") else Problem.NOT_FOUND
        try:
            return await request
        except Exception as error:
            problem = StoreError(what, error, self._scheme, absent)
            if problem.kind not in answers:
                self.log.failure(problem)
            raise problem from None

    # ---- known objects -------------------------------------------------------------------------

    def _remember(self, name: Name) -> None:
        self._absent_until_s.pop(name, None)
        self._seen[name] = None
        _forget_first(self._seen)


class _Log(RareLog):
    """Logs an action that the store refuses, and once for all actions that it fails."""

    def failure(self, error: OSError) -> None:
        if not isinstance(error, StoreError):
            super().failure(error)
        elif self.is_due(error.kind if error.is_down else (error.action, error.kind)):
            fix = f"{error.fix[0].lower()}{error.fix[1:]}"
            logger.warning(
                "Tier %s failed to %s: %s. Fix: %s.",
                *(self._label, error.action, error.problem, fix),
            )


class _Connections:
    """Bounds the requests in flight of fetches, and of spills.

    A request waits for its blocks in the order of its tokens, so an earlier fetch has all
    connections before a later one. During fetches, spills continue with a quarter of the
    connections.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._fetches = asyncio.Semaphore(number)
        self._spills = asyncio.Semaphore(number)
        self._num_fetching = 0

    async def for_fetch(self, _worker_idx: int, work: DoNext) -> None:
        self._num_fetching += 1
        try:
            async with self._fetches:
                while await work():
                    pass
        finally:
            self._num_fetching -= 1

    async def for_spill(self, worker_idx: int, work: DoNext) -> None:
        """Work off objects; during fetches, only the first workers continue."""
        async with self._spills:
            while worker_idx < max(1, self.number // 4) or not self._num_fetching:
                if not await work():
                    return


def _item_of(meta: Mapping[str, Any]) -> Item | None:
    return item_at(meta["path"], meta["size"], meta["last_modified"].timestamp())


async def next_page(pages: Any) -> Any:
    """Return the next page of a listing, None after the last."""
    return await anext(pages, None)


def _forget_first(names: dict[Name, Any]) -> None:
    if len(names) > _NAMES_MAX:
        del names[next(iter(names))]
