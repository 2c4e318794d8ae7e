"""A store as a tier: seals objects, judges them, and never offers unusable ones again."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, LoggedError, Name, Result
from safe_offload.tiers.batch import BadNames, Batch, Calls
from safe_offload.tiers.seals.seal import PLAIN, Seal
from safe_offload.tiers.store import Store

logger = logging.getLogger(f"vllm.{__name__}")

_TO_DELETE = (Result.CORRUPT, Result.FOREIGN)
_TO_HIDE = (Result.UNREADABLE, Result.UNDECRYPTABLE)
_NOT_LOGGED = {*Result}.difference(_TO_DELETE, _TO_HIDE)

T = TypeVar("T")
Work = Callable[[Batch], Awaitable[None]]


class SealedTier:
    """See `Tier`. It belongs to the loop's thread, and closes `store`.

    `facts` of its namespaces (naming.py) are stored beside the objects.
    """

    num_restarts = 0

    def __init__(
        self, store: Store, facts: Mapping[str, object] | None = None, seal: Seal = PLAIN
    ) -> None:
        self.label = store.label
        self._store = store
        self._facts = {} if facts is None else facts
        self._seal = seal
        self._bad_names = BadNames()
        self._describe_at_s: dict[bytes, float] = {}
        self._calls = Calls()

    def __repr__(self) -> str:
        return f"<SealedTier {self.label}>"

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    @property
    def num_evicted(self) -> int:
        return self._store.num_evicted

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        if self._calls.is_closed:
            raise OSError(errno.ESHUTDOWN, "the tier is closed")
        found = await self._logged(self._store.has(names)) if names else []
        if not self._bad_names:
            return found
        return [has and n not in self._bad_names for has, n in zip(found, names, strict=True)]

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(self._get, names, slots)

    async def spill(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        return await self._run(self._put, names, slots)

    async def close(self) -> None:
        await self._calls.close()
        await self._store.close()

    async def _run(
        self, work: Work, names: Sequence[Name], slots: Sequence[Buffers]
    ) -> list[Result]:
        batch = Batch(names, slots, self._seal, self._bad_names)
        if self._calls.is_closed or not names:
            return batch.results
        call = asyncio.ensure_future(self._work_off(work, batch))

        def give_up() -> None:
            batch.left.clear()
            call.cancel()

        await self._calls.outlast([call], give_up)
        return batch.results

    async def _work_off(self, work: Work, batch: Batch) -> None:
        try:
            await work(batch)
        except Exception:
            logger.exception("Unexpected error in tier %s, which stays in use", self.label)
            not_ended = (i for i, r in enumerate(batch.results) if r is Result.CANCELLED)
            batch.settle(not_ended, Result.FAILED)

    async def _logged(self, call: Awaitable[T]) -> T:
        """Return the result of a call to the store; an OSError is logged, then raised."""
        try:
            return await call
        except OSError as error:
            if not (isinstance(error, LoggedError) or self._calls.is_closed):
                self._store.log.failure(error)
            raise

    async def _get(self, batch: Batch) -> None:
        await self._store.get(batch)
        self._remember_bad(batch)
        bad = [i for i, result in enumerate(batch.results) if result in _TO_DELETE]
        if not bad:
            return
        names = [batch.names[index] for index in bad]
        try:
            await self._logged(self._store.delete([self._store.key_of(name) for name in names]))
        except OSError:
            for name in names:
                self._bad_names.add(name)

    async def _put(self, batch: Batch) -> None:
        await self._store.put(batch)
        self._remember_bad(batch)
        done = zip(batch.names, batch.results, strict=True)
        await self._describe({n.namespace for n, r in done if r is Result.DONE}, batch.undescribed)

    def _remember_bad(self, batch: Batch) -> None:
        """Remember which objects are unusable, and which are usable again."""
        if not self._bad_names and _NOT_LOGGED.issuperset(batch.results):
            return
        for name, result in zip(batch.names, batch.results, strict=True):
            if result is Result.DONE:
                self._bad_names.discard(name)
            elif result not in _NOT_LOGGED:
                self._store.log.bad_object(result, self._store.key_of(name))
                if result in _TO_HIDE:
                    self._bad_names.add(name)

    async def _describe(self, namespaces: set[bytes], undescribed: set[bytes]) -> None:
        """Store the description of namespaces, once, and again before it expires."""
        now_s = asyncio.get_running_loop().time()
        for namespace in namespaces:
            if self._describe_at_s.get(namespace, 0.0) > now_s and namespace not in undescribed:
                continue
            if len(self._describe_at_s) >= naming.NAMESPACES_MAX:
                self._describe_at_s.clear()
            text = naming.description(namespace, self._facts)
            text = self._seal.closed_description(namespace, text)
            try:
                stays_s = await self._logged(self._store.describe(namespace, text))
            except OSError:  # the next call tries again
                continue
            self._describe_at_s[namespace] = now_s + stays_s / 2
