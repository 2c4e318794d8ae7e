"""The least that a kind of place is: docs/hacking.md names it, test_toy_kind.py runs it.

Objects are in the memory of this process. Its line in `config.tiers.KINDS` would be

    "memory": Scheme("memory://NAME", "tests.tiers.toy_kind:MemoryStore"),
"""

import asyncio
import errno
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.batch import Batch
from safe_offload.tiers.naming import is_namespace_folder, namespace_folder
from safe_offload.tiers.store import Item, Store, item_at

PLACES: dict[str, dict[str, bytes]] = defaultdict(dict)
"""What is stored, by the url of the tier and the key."""


class MemoryStore(Store):
    def __init__(self, config: TierConfig, slot_bytes: int = 0) -> None:
        super().__init__(config, slot_bytes)
        self._stored = PLACES[self.label]

    async def has(self, names: Sequence[Name]) -> list[bool]:
        return [self.key_of(name) in self._stored for name in names]

    async def get(self, batch: Batch) -> None:
        for index in batch.take_left():
            await asyncio.sleep(0)  # where another place is waited for, and may be given up
            found = self._stored.get(self.key_of(batch.names[index]))
            result = Result.ABSENT if found is None else await batch.take(index, found)
            batch.results[index] = result

    async def put(self, batch: Batch) -> None:
        for index in batch.take_left():
            await asyncio.sleep(0)
            key = self.key_of(batch.names[index])
            if key in self._stored and not batch.is_bad(index):
                batch.results[index] = Result.PRESENT
            else:
                self._stored[key] = await batch.whole(index)
                batch.results[index] = Result.DONE

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        return [self._stored.pop(key, None) is not None for key in keys]

    async def describe(self, namespace: bytes, text: bytes) -> float:
        self._stored[self.description_key(namespace_folder(namespace))] = text
        return math.inf

    async def namespaces(self) -> list[str]:
        return sorted(filter(is_namespace_folder, {key.split("/")[0] for key in self._stored}))

    async def walk(self, namespace: str = "") -> AsyncIterator[list[Item]]:
        stored = {k: v for k, v in self._stored.items() if k.startswith(namespace)}
        yield list(filter(None, (item_at(k, len(v), time.time()) for k, v in stored.items())))

    async def read(self, key: str, start: int, length: int) -> bytes:
        if key not in self._stored:
            raise FileNotFoundError(errno.ENOENT, "no such object")
        return self._stored[key][start : start + length]
