"""Checksums of host slots: noted behind every store, compared behind a load.

A bit that flips in host memory is not seen by anything else. The look comes behind the copy of a
load and not ahead of it: what changed between a look and its copy would be served. Until the look
is over nobody is told of the load, so what it found changed is never attended to.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from safe_offload.worker.backends.base import Backend, Copy, Direction
from safe_offload.worker.threads import start_threads


class Verifier:
    """The checksums of one rank.

    Args:
        backend: computes them.
        every: one in so many slots of a load is looked at, others each time; all for 1.
        kept: one for each slot, where other ranks note what they store too; None for an array of
            this rank's own.
    """

    def __init__(
        self, backend: Backend, every: int, kept: npt.NDArray[np.uint64] | None = None
    ) -> None:
        self._backend = backend
        self._every = every
        self._kept = np.zeros(backend.num_slots, dtype=np.uint64) if kept is None else kept
        # A thread for each direction, so that no load waits for the checksums of stores.
        self.executors = {
            direction: start_threads(1, f"safe-offload-verify-{direction.value}")
            for direction in Direction
        }

    def look(self, transfer_id: int, copy: Copy) -> list[int]:
        """Note or compare the slots of a copy that has ended well.

        Args:
            transfer_id: decides which slots of a load are looked at.
            copy: nothing else may write its slots meanwhile.

        Returns:
            The slots of a load that have changed since they were stored.
        """
        if copy.direction is Direction.STORE:
            self._kept[copy.slot_ids] = self._backend.checksums(copy.slot_ids)
            return []
        slot_ids = np.unique(copy.slot_ids[transfer_id % self._every :: self._every])
        is_bad = self._backend.checksums(slot_ids) != self._kept[slot_ids]
        return [int(slot_id) for slot_id in slot_ids[is_bad]]

    def close(self) -> None:
        """Wait until nothing looks at host memory any more; a second call does nothing."""
        for executor in self.executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in self.executors.values():
            executor.shutdown(wait=True)
