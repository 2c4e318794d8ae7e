"""The interface of a backend to transfers.

Transfers decide when a copy may start and what its end means; a backend only copies and orders.
Every backend passes the same contract suite (tests/worker/copies/contract.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from safe_offload.protocol import MemoryFacts


class Direction(enum.Enum):
    """Which way the bytes go: host slots to GPU blocks, or GPU blocks to host slots."""

    LOAD = "load"
    STORE = "store"


class CopyPath(enum.Enum):
    """How the bytes of a copy are moved; a path that fails is left for the one below it."""

    KERNEL = "kernel"
    """One kernel launch: multiprocessors do it."""
    BATCH = "batch"
    """One call for all ranges: the copy engines of a GPU do it."""
    EACH = "each"
    """One call for each range."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Whole blocks to or from whole slots: two arrays of shape (n,), int64.

    No slot is twice in a store.
    """

    direction: Direction
    block_ids: npt.NDArray[np.int64]
    slot_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """The time of a copy by a path, from its submission until the loop knew its end."""

    path: CopyPath
    copy: Copy
    seconds: float


class Completion(Protocol):
    """A copy that has been issued, by a path."""

    path: CopyPath

    async def wait(self) -> None:
        """Return when all its bytes are in place; raise TransferError if it has failed."""

    def cancel(self) -> bool:
        """Take the copy back, if it has not begun. Called on the loop's thread.

        Return True if it has moved nothing and never will: `wait` then raises TransferError at
        once. The rest of one that has begun may be given up: `wait` raises when what has begun has
        ended.
        """


class Backend(Protocol):
    """Copies between one rank's GPU blocks and its host slots; counts the paths that failed."""

    slot_bytes: int
    num_slots: int
    num_demotions: int

    @property
    def num_usable_slots(self) -> int:
        """Return how many slots, from the first, may be used; it grows as memory gets ready."""

    def mark(self) -> Any:
        """Mark the current end of the compute stream. Called on vLLM's thread."""

    def issue(self, copy: Copy, after: Any) -> Completion:
        """Start a copy that begins when the compute stream has passed `after`, without waiting.

        Called on the loop's thread, which does not wait for the device's driver either. Copies of
        the two directions do not wait for one another. TransferError: an id lies outside the
        memory; nothing was started.
        """

    def fence(self, completion: Completion, timeout_s: float) -> bool:
        """Order everything that vLLM does next after the reads of a copy. Called on vLLM's thread.

        A backend with streams makes them wait, when the driver has been given the copy; one without
        waits itself. Return False if the copy may still be reading: its source is about to change.
        """

    def join(self, completion: Completion) -> bool:
        """Order everything that vLLM does next after the writes of a copy; return if it succeeds.

        Called on vLLM's thread, which waits until all of the copy has been given to the driver,
        without streams until it has ended. A copy that fails is ordered, too, as its blocks are
        about to be recomputed; one that succeeds here can fail no more.
        """

    def checksums(self, slot_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a checksum of every byte of each slot, which nothing may write meanwhile.

        Called on threads of its own, not after `close`.
        """

    def end_copies(self) -> None:
        """Wait for copies that have started, fail the others; a second call does nothing."""

    def close(self) -> None:
        """End the copies and free the host memory; a second call does nothing."""


class ProvableBackend(Backend, Protocol):
    """A backend whose copy `paths` in use can be tried one by one (worker/self_test.py)."""

    paths: tuple[CopyPath, ...]
    # See `HostFacts`; of the slowest timed path. 0 without streams, where the host would wait.
    load_block_s: float

    @property
    def choices(self) -> tuple[CopyPath, ...]:
        """Return the paths between which each copy chooses; empty if all take the same."""

    @property
    def memory(self) -> MemoryFacts:
        """Return facts of the host memory; another object once they have changed."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context in which no memory is prepared in the background."""

    def use(self, paths: tuple[CopyPath, ...], timed: Sequence[TimedCopy] = ()) -> None:
        """Copy by some of its paths only, the preferred one first; nothing is being copied.

        Without times in `timed`, it chooses by measurements of other machines.
        """
