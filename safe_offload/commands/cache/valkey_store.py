"""A Valkey or Redis server or cluster, as `safe-offload cache` uses it.

Keys are found with SCAN, and only those of ours. To look at them is not to use them: the server is
told so (CLIENT NO-TOUCH, since 7.2), or else asked for what they take in memory in the place of
their length. There only `verify` counts as a use.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from safe_offload.commands.cache.store import Item, TierStore
from safe_offload.commands.cache.valkey_client import Server
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import MIB
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.valkey.names import (
    ALL_KEYS,
    PREFIX,
    description_key,
    name_of_key,
    namespace_of_key,
)

if TYPE_CHECKING:
    from redis import Redis

TIMEOUT_S: Final = 10.0
_PIECE_BYTES: Final = 4 * MIB
_BATCH_KEYS: Final = 1000


class ValkeyStore(TierStore):
    """A server or cluster.

    Raises:
        CacheError: it cannot be used, with the fix.
    """

    def __init__(self, config: TierConfig) -> None:
        self._server = Server(config, TIMEOUT_S)
        self.label = self._server.label

    def namespaces(self) -> Mapping[str, bytes]:
        """See `TierStore`; a server may have evicted a description."""
        found = dict[str, bytes]()
        with self._server.errors():
            for _, keys in self._keys(ALL_KEYS):
                found.update(dict.fromkeys(filter(None, map(namespace_of_key, keys)), b""))
            return {namespace: self._description(namespace) for namespace in sorted(found)}

    def items(self, namespace: str = "") -> Iterator[Item]:
        """See `TierStore`."""
        pattern = f"{PREFIX}{namespace}:*" if namespace else ALL_KEYS
        with self._server.errors():
            for node, keys in self._keys(pattern):
                yield from self._items(node, keys)

    def pieces(self, item: Item) -> Iterator[bytes]:
        """See `TierStore`."""
        with self._server.errors():
            yield self._range(item.place, 0, HEADER_BYTES)
            at = HEADER_BYTES
            while piece := self._range(item.place, at, _PIECE_BYTES):
                yield piece
                at += len(piece)
            if not self._server.node_of(item.place).exists(item.place):
                raise FileNotFoundError(errno.ENOENT, "evicted")

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """See `TierStore`."""
        were_there = self._unlink(item.place for item in items)
        return [item for item, was in zip(items, were_there, strict=True) if was]

    def forget(self, namespaces: Sequence[str]) -> None:
        """See `TierStore`."""
        self._unlink(description_key(bytes.fromhex(name)).decode() for name in namespaces)

    def close(self) -> None:
        """See `TierStore`."""
        self._server.close()

    def _keys(self, pattern: str) -> Iterator[tuple[Redis, list[bytes]]]:
        """Yield keys of one node at a time; one may come twice."""
        for node in self._server.nodes:
            cursor = 0
            while True:
                cursor, found = node.scan(cursor, match=pattern, count=_BATCH_KEYS)
                keys = [key for key in found if isinstance(key, bytes)]
                if keys:
                    yield node, keys
                if not cursor:
                    break

    def _items(self, node: Redis, keys: Iterable[bytes]) -> Iterator[Item]:
        found = [(ns, key) for key in keys if (ns := namespace_of_key(key))]
        found = [(ns, key) for ns, key in found if key != description_key(bytes.fromhex(ns))]
        batch = node.pipeline(transaction=False)
        for _, key in found:
            batch.object("idletime", key)
            if self._server.keeps_use:
                batch.strlen(key)
            else:
                batch.memory_usage(key)
        answers = iter(batch.execute(raise_on_error=False))
        now_s = time.time()
        for namespace, key in found:
            idle_s, size_bytes = next(answers), next(answers)
            if isinstance(size_bytes, Exception) and not _is_other_type(size_bytes):
                raise size_bytes
            if not size_bytes:
                continue  # evicted meanwhile
            used_at_s = now_s - idle_s if isinstance(idle_s, int) else 0.0
            size_bytes = size_bytes if isinstance(size_bytes, int) else 0
            yield Item(namespace, key.decode(), name_of_key(key), size_bytes, used_at_s)

    def _range(self, key: str, at: int, length_bytes: int) -> bytes:
        try:
            found: Any = self._server.node_of(key).getrange(key, at, at + length_bytes - 1)
        except Exception as error:
            if _is_other_type(error):
                raise OSError(errno.EINVAL, "it is not a string") from error
            raise
        return bytes(found)

    def _description(self, namespace: str) -> bytes:
        with contextlib.suppress(OSError):
            return self._range(description_key(bytes.fromhex(namespace)).decode(), 0, MIB)
        return b""

    def _unlink(self, keys: Iterable[str]) -> list[bool]:
        """Delete keys; return which were there."""
        with self._server.errors():
            placed: dict[Redis, list[int]] = {}
            every = list(keys)
            for index, key in enumerate(every):
                placed.setdefault(self._server.node_of(key), []).append(index)
            was_there = [False] * len(every)
            for node, indices in placed.items():
                batch = node.pipeline(transaction=False)
                for index in indices:
                    batch.unlink(every[index])
                for index, answer in zip(indices, batch.execute(), strict=True):
                    was_there[index] = bool(answer)
            return was_there


def _is_other_type(error: Any) -> bool:
    """Return whether a server says that a key holds something else than bytes."""
    return str(error).startswith("WRONGTYPE")
