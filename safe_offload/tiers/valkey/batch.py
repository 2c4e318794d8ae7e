"""Objects of a server that are moved together, and what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.valkey.names import key_of


class Batch:
    """See the module; objects are known by their index.

    Args:
        names: of the objects.
        slots: of each, where its bytes belong or come from.
    """

    def __init__(self, names: Sequence[Name], slots: Sequence[Buffers]) -> None:
        self.names = names
        self.slots = slots
        self.keys = [key_of(name) for name in names]
        self.results = [Result.CANCELLED] * len(names)
        """What became of each, so far."""
        self.moved: list[int] = []
        """What is on another server than was thought."""
        self.bad: list[int] = []
        """What is to be deleted."""
        self._sizes = [sum(buffer.nbytes for buffer in slot) for slot in slots]

    def size_bytes(self, index: int) -> int:
        """Return what an object takes on the server, its header too."""
        return HEADER_BYTES + self._sizes[index]

    def settle(self, indices: Iterable[int], result: Result) -> None:
        """Note what became of some objects."""
        for index in indices:
            self.results[index] = result

    def take_moved(self) -> list[int]:
        """Return what is on another server than was thought, and forget it."""
        moved, self.moved = self.moved, []
        return moved

    def spoil(self, index: int, result: Result) -> Result:
        """Note that an object is to be deleted; return what it is."""
        self.bad.append(index)
        return result
