"""Stores in flight, and the fences that they need.

No store holds a reference on a GPU block (I2). While the request runs, its own reference protects
its blocks; once they are free their bytes stay intact until vLLM gives them to somebody and a
kernel or a load of a later step writes them. When a block was given away (`witness.py` tells), the
plan of that step fences the store: nothing of the step may write before the copy has read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safe_offload.errors import InvariantError

if TYPE_CHECKING:
    from safe_offload.scheduler.leases import Lease
    from safe_offload.scheduler.witness import Sources


@dataclass(slots=True, eq=False)
class Part:
    """What a store keeps of one KV cache group.

    Attributes:
        sources: the blocks that it reads.
        lease: the slots that it writes, one for each of them.
    """

    sources: Sources
    lease: Lease


@dataclass(slots=True, eq=False)
class Store:
    """A store from its planning until every rank has reported it.

    Attributes:
        parts: what it keeps, of all requests of its step.
        epoch: of the host index when it was planned; a store from before a reset is not published.
        ranks_left: ranks that have not reported it.
        poisoned: its bytes cannot be trusted; it is never published.
    """

    transfer_id: int
    parts: list[Part]
    epoch: int
    ranks_left: set[int]
    poisoned: bool = False

    @property
    def num_blocks(self) -> int:
        """That it keeps."""
        return sum(len(part.lease.slots) for part in self.parts)

    def source_given_away(self) -> bool:
        """Whether any of its blocks changed hands."""
        return any(part.sources.given_away() for part in self.parts)

    def reads(self, block_ids: Collection[int]) -> bool:
        """Whether it reads one of these blocks."""
        return any(block.block_id in block_ids for p in self.parts for block in p.sources.blocks)


@dataclass(slots=True)
class StoresInFlight:
    """The stores that a plan has named and that not all ranks have reported."""

    _stores: dict[int, Store] = field(default_factory=dict)
    _unfenced: dict[int, Store] = field(default_factory=dict)

    def add(self, store: Store, *, is_fenced: bool) -> None:
        """Take a store; watch its sources, unless it is fenced already."""
        self._stores[store.transfer_id] = store
        if not is_fenced:
            self._unfenced[store.transfer_id] = store

    def remove(self, store: Store) -> None:
        """Stop watching a store that has settled."""
        del self._stores[store.transfer_id]
        self._unfenced.pop(store.transfer_id, None)

    def get(self, transfer_id: int) -> Store | None:
        """The store of that id, if it is in flight."""
        return self._stores.get(transfer_id)

    def fence(self) -> list[Store]:
        """The stores whose source changed hands since the last call; they are watched no more."""
        if not self._unfenced:
            return []
        fenced = [store for store in self._unfenced.values() if store.source_given_away()]
        for store in fenced:
            del self._unfenced[store.transfer_id]
        return fenced

    def __iter__(self) -> Iterator[Store]:
        return iter(self._stores.values())

    def __len__(self) -> int:
        return len(self._stores)

    def check_invariants(self) -> None:
        """An unfenced store still owns its sources' bytes.

        Raises:
            InvariantError: a store in flight reads a block that was given away, without a fence.
        """
        for store in self._unfenced.values():
            if store.source_given_away():
                raise InvariantError(
                    "I6", f"store {store.transfer_id} reads a block that was given away, unfenced"
                )
