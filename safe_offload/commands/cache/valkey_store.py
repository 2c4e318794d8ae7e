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
from typing import Any, Final

from safe_offload.commands.cache.store import Item, TierStore
from safe_offload.commands.cache.valkey_client import TEXT_BYTES_MAX, Client
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.valkey.names import (
    ALL_KEYS,
    PREFIX,
    description_key,
    key_of,
    name_of_key,
    namespace_of_key,
)
from safe_offload.tiers.valkey.replies import ErrorReply
from safe_offload.tiers.valkey.servers import Node

TIMEOUT_S: Final = 10.0
_PIECE_BYTES: Final = TEXT_BYTES_MAX
_BATCH_KEYS: Final = b"1000"
_STRANGE: Final = ErrorReply("ERR", "")
"""Stands for an answer of another kind than was asked for."""


class ValkeyStore(TierStore):
    """A server or cluster; raises as `Client`."""

    def __init__(self, config: TierConfig) -> None:
        self._client = Client(config, TIMEOUT_S)
        self.label = self._client.label

    def place_of(self, name: Name) -> str:
        return key_of(name).decode()

    def namespaces(self) -> Mapping[str, bytes]:
        """See `TierStore`; a server may have evicted a description."""
        found = dict[str, bytes]()
        for _, keys in self._keys(ALL_KEYS):
            found.update(dict.fromkeys(filter(None, map(namespace_of_key, keys)), b""))
        return {namespace: self._description(namespace) for namespace in sorted(found)}

    def items(self, namespace: str = "") -> Iterator[Item]:
        for node, keys in self._keys(f"{PREFIX}{namespace}:*" if namespace else ALL_KEYS):
            yield from self._items(node, keys)

    def pieces(self, item: Item) -> Iterator[bytes]:
        key = item.place.encode()
        yield self._range(key, 0, HEADER_BYTES)
        at = HEADER_BYTES
        while piece := self._range(key, at, _PIECE_BYTES):
            yield piece
            at += len(piece)
        if not self._client.answer(self._client.node_of(key), b"EXISTS", key):
            raise FileNotFoundError(errno.ENOENT, "evicted")

    def _delete(self, items: Sequence[Item]) -> list[Item]:
        were_there = self._unlink([item.place.encode() for item in items])
        return [item for item, was in zip(items, were_there, strict=True) if was]

    def _forget(self, namespaces: Sequence[str]) -> None:
        self._unlink([description_key(bytes.fromhex(name)) for name in namespaces])

    def close(self) -> None:
        self._client.close()

    def _keys(self, pattern: str) -> Iterator[tuple[Node, list[bytes]]]:
        """Yield keys of one node at a time; one may come twice."""
        for node in self._client.nodes:
            cursor = b"0"
            while True:
                words = (cursor, b"MATCH", pattern.encode(), b"COUNT", _BATCH_KEYS)
                match self._client.answer(node, b"SCAN", *words):
                    case [bytes(cursor), list(found)]:
                        yield node, [key for key in found if isinstance(key, bytes)]
                    case _:
                        raise self._client.refusal(_STRANGE)
                if cursor == b"0":
                    break

    def _items(self, node: Node, keys: Iterable[bytes]) -> Iterator[Item]:
        found = [(ns, key) for key in keys if (ns := namespace_of_key(key))]
        found = [(ns, key) for ns, key in found if key != description_key(bytes.fromhex(ns))]
        length = (b"STRLEN",) if self._client.keeps_use else (b"MEMORY", b"USAGE")
        asked = [
            words for _, key in found for words in ((b"OBJECT", b"IDLETIME", key), (*length, key))
        ]
        answers: Iterator[Any] = iter(self._client.ask(node, *asked))
        now_s = time.time()
        for namespace, key in found:
            idle_s, size_bytes = next(answers), next(answers)
            if isinstance(size_bytes, ErrorReply) and size_bytes.code != "WRONGTYPE":
                raise self._client.refusal(size_bytes)
            if not size_bytes:
                continue  # evicted meanwhile
            used_at_s = now_s - idle_s if isinstance(idle_s, int) else 0.0
            size_bytes = size_bytes if isinstance(size_bytes, int) else 0
            yield Item(namespace, key.decode(), name_of_key(key), size_bytes, used_at_s)

    def _range(self, key: bytes, at: int, length_bytes: int) -> bytes:
        words = (key, b"%d" % at, b"%d" % (at + length_bytes - 1))
        (found,) = self._client.ask(self._client.node_of(key), (b"GETRANGE", *words))
        if isinstance(found, ErrorReply) and found.code == "WRONGTYPE":
            raise OSError(errno.EINVAL, "it is not a string")
        if not isinstance(found, bytes):
            raise self._client.refusal(found if isinstance(found, ErrorReply) else _STRANGE)
        return found

    def _description(self, namespace: str) -> bytes:
        with contextlib.suppress(OSError):
            return self._range(description_key(bytes.fromhex(namespace)), 0, _PIECE_BYTES)
        return b""

    def _unlink(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete keys; return which were there."""
        placed: dict[Node, list[int]] = {}
        for index, key in enumerate(keys):
            placed.setdefault(self._client.node_of(key), []).append(index)
        was_there = [False] * len(keys)
        for node, indices in placed.items():
            asked = [keys[index] for index in indices]
            answers = self._client.ask(node, *((b"UNLINK", key) for key in asked))
            if any(
                isinstance(answer, ErrorReply) and answer.code == "NOPERM" for answer in answers
            ):
                # The user of an engine may have DEL alone.
                answers = self._client.ask(node, *((b"DEL", key) for key in asked))
            for index, answer in zip(indices, answers, strict=True):
                if isinstance(answer, ErrorReply):
                    raise self._client.refusal(answer)
                was_there[index] = bool(answer)
        return was_there
