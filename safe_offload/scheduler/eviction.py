"""Which host slot is granted next: eviction policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """The slots that hold something and that nobody leases."""

    def release(self, slots: Sequence[int]) -> None:
        """Nobody leases these any more; the first is to go first."""

    def lease(self, slots: Iterable[int]) -> None:
        """These are needed again."""

    def evict(self, count: int) -> list[int]:
        """Take out up to `count` slots, to be overwritten."""

    def forget(self, slots: Iterable[int]) -> None:
        """What these hold is worth nothing: take them out."""

    def __len__(self) -> int:
        """Evictable slots."""


class Lru:
    """Least recently used first."""

    def __init__(self, keys: Sequence[bytes | None]) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()

    def release(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
        self._slots.update(dict.fromkeys(slots))

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        pop = self._slots.pop
        for slot in slots:
            pop(slot, None)

    def evict(self, count: int) -> list[int]:
        """See `EvictionPolicy`."""
        pop = self._slots.popitem
        return [pop(last=False)[0] for _ in range(min(count, len(self._slots)))]

    def forget(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self.lease(slots)

    def __len__(self) -> int:
        return len(self._slots)


POLICIES = {"lru": Lru}


def make_policy(name: str, keys: Sequence[bytes | None], num_slots: int) -> EvictionPolicy:
    """The policy of that name."""
    return POLICIES[name](keys)
