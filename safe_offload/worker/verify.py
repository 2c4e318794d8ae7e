"""Checksums of host slots: recorded after every store and fetch, compared after a load's copy.

A spill compares them first: otherwise a flipped bit would reach a tier, with a valid checksum of
the tier. A load is reported after the comparison, so that attention never reads a corrupted block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from safe_offload.worker.copies.base import Backend, Copy, Direction

T = TypeVar("T")


class Threads(Protocol):
    """Where checksums are computed, so that no load waits for those of a store."""

    async def run(self, direction: Direction, function: Callable[..., T], *args: object) -> T:
        """Return what a function returns, run beside the event loop."""

    def close(self) -> None:
        """Wait for running functions, and start no more; a second call does nothing."""


class Verifier:
    """The checksums of one rank.

    Args:
        threads: closed by `close`.
        every: one in this many slots of a load is compared, different ones each time; all for 1.
        kept: one for each slot, where other ranks record their stores too; None for an array of
            this rank's own. Changed on the threads, for slots of a store in flight.
    """

    def __init__(
        self,
        backend: Backend,
        threads: Threads,
        every: int,
        kept: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        self._backend = backend
        self._threads = threads
        self._every = every
        self._kept = np.zeros(backend.num_slots, dtype=np.uint64) if kept is None else kept
        assert len(self._kept) == backend.num_slots

    async def check(self, transfer_id: int, copy: Copy) -> list[int]:
        """Record or compare the slots of a successful copy; nothing may write them yet.

        Return the slots of a load, of those that `transfer_id` picks, that were changed.
        """
        return await self._threads.run(copy.direction, self._look, transfer_id, copy)

    async def record(self, slot_ids: npt.NDArray[np.int64]) -> None:
        """Record slots that were fetched; nothing may write them yet."""
        await self._threads.run(Direction.STORE, self._record, slot_ids)

    async def changed(self, slot_ids: npt.NDArray[np.int64]) -> list[int]:
        """Return the slots whose checksum differs; nothing may write them yet."""
        return await self._threads.run(Direction.STORE, self._compare, slot_ids)

    def close(self) -> None:
        """Wait until host memory is no longer read; a second call does nothing."""
        self._threads.close()

    def _look(self, transfer_id: int, copy: Copy) -> list[int]:
        if copy.direction is Direction.STORE:
            self._record(copy.slot_ids)
            return []
        return self._compare(np.unique(copy.slot_ids[transfer_id % self._every :: self._every]))

    def _compare(self, slot_ids: npt.NDArray[np.int64]) -> list[int]:
        is_bad = self._backend.checksums(slot_ids) != self._kept[slot_ids]
        return [int(slot_id) for slot_id in slot_ids[is_bad]]

    def _record(self, slot_ids: npt.NDArray[np.int64]) -> None:
        self._kept[slot_ids] = self._backend.checksums(slot_ids)
