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
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.witness import Source


@dataclass(slots=True, eq=False)
class Store:
    """A store from its planning until every rank has reported it.

    Attributes:
        lease: the slots it writes, one for each source.
        owner: the request whose prefix it extends; None if it belongs to nobody's.
        epoch: of the host index when it was planned; a store from before a reset is not published.
        ranks_left: ranks that have not reported it.
        poisoned: its bytes cannot be trusted; it is never published.
        fenced: a plan has ordered the compute stream behind it, so it needs no further watching.
    """

    transfer_id: int
    sources: list[Source]
    lease: Lease
    owner: RequestState | None
    epoch: int
    ranks_left: set[int]
    poisoned: bool = False
    fenced: bool = False

    def source_given_away(self) -> bool:
        """Whether any of its blocks changed hands."""
        return any(source.given_away for source in self.sources)


@dataclass(slots=True)
class StoresInFlight:
    """The stores that a plan has named and that not all ranks have reported."""

    _stores: dict[int, Store] = field(default_factory=dict)
    _unfenced: dict[int, Store] = field(default_factory=dict)
    _keys: dict[bytes, int] = field(default_factory=dict)
    num_blocks: int = 0
    """Of all of them together."""

    def add(self, store: Store) -> None:
        """Watch a store from now on."""
        self._stores[store.transfer_id] = store
        self._unfenced[store.transfer_id] = store
        self.num_blocks += len(store.sources)
        self._keys.update((source.keys[0], store.transfer_id) for source in store.sources)

    def remove(self, transfer_id: int) -> Store:
        """Stop watching a store that has settled."""
        store = self._stores.pop(transfer_id)
        self._unfenced.pop(transfer_id, None)
        self.num_blocks -= len(store.sources)
        for source in store.sources:
            if self._keys.get(source.keys[0]) == transfer_id:
                del self._keys[source.keys[0]]
        return store

    def get(self, transfer_id: int) -> Store | None:
        """The store of that id, if it is in flight."""
        return self._stores.get(transfer_id)

    def stores_key(self, key: bytes) -> bool:
        """Whether a store of this block hash is in flight, to be published."""
        return key in self._keys

    def forget_keys(self) -> None:
        """What is in flight now will not be published."""
        self._keys.clear()

    def fence(self, early_written: Collection[int]) -> list[int]:
        """Ids of the stores whose source changed hands since the last call.

        Args:
            early_written: blocks that the workers write before they can honour a fence of this
                step; a store that reads one of them is poisoned instead.
        """
        fenced = [store for store in self._unfenced.values() if store.source_given_away()]
        for store in fenced:
            store.fenced = True
            del self._unfenced[store.transfer_id]
            if early_written and any(s.block.block_id in early_written for s in store.sources):
                store.poisoned = True
        return [store.transfer_id for store in fenced]

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
