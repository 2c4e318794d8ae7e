"""The interface of a tier: objects by name, read into host slots and written from them.

An object is one block of one KV cache group of one rank. All methods are coroutines on the event
loop of the transfers; blocking calls (pread, pwrite) run on the tier's own threads. Deadlines and
circuit breaker are around a tier, not in it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

Buffers = tuple[memoryview, ...]
"""The byte ranges of one host slot, in the order of its segments; writable."""

SINK: Final = memoryview(bytearray(4096))
"""Receives the rest of an aborted connection, whose own memory is freed at once: it may be part of
a cycle, and a bad server ends many."""


class Result(enum.Enum):
    """The outcome of one object."""

    DONE = "done"
    """Its bytes are in place."""
    PRESENT = "present"
    """It was there already, so it was not written."""
    ABSENT = "absent"
    """There is no such object."""
    CORRUPT = "corrupt"
    """It is short, long or torn, or its checksum is wrong. It was deleted."""
    FOREIGN = "foreign"
    """Its header names another namespace, key, group, rank or version. It was deleted."""
    UNREADABLE = "unreadable"
    """Something of that name cannot be read: permissions, a directory, a link."""
    UNDECRYPTABLE = "undecryptable"
    """It is encrypted with a key that the tier does not have."""
    FULL = "full"
    """There is no room for it."""
    STILL_FULL = "still_full"
    """There is still no room, although some was made: the next write would fail too."""
    REFUSED = "refused"
    """The tier refuses it: it is read-only, or the user may not write."""
    FAILED = "failed"
    """The tier failed: an input or output error, a connection that is lost."""
    CANCELLED = "cancelled"
    """It was cancelled, before it was begun or before it was complete."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of an object, with its hash as vLLM computes it, and the mark of its tenant."""

    namespace: bytes
    group_idx: int
    block_hash: bytes
    mark: int = field(default=0, compare=False)


class PlaceError(OSError):
    """A place refuses a request, or cannot be reached. Its text contains no secret.

    Attributes:
        fix: as a sentence without its full stop; empty if unknown.
        is_down: the place does not answer; it may later.
    """

    def __init__(self, problem: str, fix: str = "", *, is_down: bool = False) -> None:
        super().__init__(f"{problem}. {fix}" if fix else problem)
        self.problem, self.fix, self.is_down = problem, fix, is_down

    def line_for(self, label: str) -> str:
        """Return a line with the problem of a place, and the fix."""
        fix = self.fix or "Check the log of its server"
        return f"{label}: {self.problem}. Fix: {fix[0].lower()}{fix[1:]}."


class LoggedError(OSError):
    """A call to a tier failed; the reason and the fix have been logged."""


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in our words or the system's, without names of classes."""
    if isinstance(error, PlaceError) or not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = f" ({error.filename})" if error.filename is not None else ""
    return f"{error.strerror or str(error) or type(error).__name__}{where}"


class Tier(Protocol):
    """A place for objects; `label`, for the log and the metrics, contains no secret."""

    label: str

    @property
    def used_bytes(self) -> int:
        """Return how much it holds; -1 if unknown."""

    @property
    def num_evicted(self) -> int:
        """Return how many objects this process has deleted to keep its capacity."""

    @property
    def num_restarts(self) -> int:
        """Return how often its process was started again; 0 for one in the engine's."""

    async def probe(self, names: Sequence[Name]) -> list[bool]:
        """Return which objects exist now, or raise OSError if there is no answer."""

    async def fetch(self, names: Sequence[Name], slots: Sequence[Any]) -> list[Result]:
        """Read objects into slots; the slot of an object that is not DONE may contain anything.

        A slot is its buffers, or its number where the tier is in a process of its own.

        When this returns or raises, nothing writes to the slots any more. When cancelled, it skips
        the objects that it has not begun, waits for those that cannot be cancelled, and returns
        normally; objects that it skipped are CANCELLED.
        """

    async def spill(self, names: Sequence[Name], slots: Sequence[Any]) -> list[Result]:
        """Write slots to objects, each whole or not at all; cancelled as `fetch` is.

        When this returns or raises, nothing reads the slots any more.
        """

    async def close(self) -> None:
        """Wait for calls in flight, and release what the tier holds; a second call does nothing."""
