"""Taking, leasing and giving back host slots.

A slot is one position in the host memory of every rank, as large as one GPU block. The slots are
the blocks of a `BlockPool` of vLLM's, so that its prefix-hit rules for hybrid models work on them;
its reference count is the number of leases. The pool's block 0 is vLLM's null block, so slot `s` is
the pool's block `s + 1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from safe_offload.errors import InvariantError

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def slot_id(slot: KVCacheBlock) -> int:
    """Position of a slot in host memory, from 0."""
    return int(slot.block_id) - 1


class SlotPool:
    """Host slots, least recently used first; every operation is one step that cannot half happen.

    Slots become usable as all ranks say how many they have (`open`); before that, and when the pool
    is full of leased slots, a smaller grant is the normal answer.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_usable = 0
        self._retired: set[int] = set()

    @property
    def num_slots(self) -> int:
        """Slots in the pool, usable or not."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_usable(self) -> int:
        """Slots that every rank has."""
        return self._num_usable

    @property
    def num_free(self) -> int:
        """Slots that nothing leases; they may hold cached prefixes, which a grant then evicts."""
        return int(self._pool.get_num_free_blocks()) if self._num_usable else 0

    @property
    def num_leased(self) -> int:
        """Slots under at least one lease; those that are retired do not count."""
        return self._num_usable - self.num_free - self.num_retired if self._num_usable else 0

    @property
    def num_retired(self) -> int:
        """Slots that are never granted again."""
        return len(self._retired)

    def open(self, num_usable: int) -> None:
        """Allow the first `num_usable` slots and withhold the others.

        Called when the capacity of every rank is known, and again when it has grown: memory is made
        ready piece by piece. Fewer than before changes nothing.
        """
        num_usable = min(num_usable, self.num_slots)
        if num_usable <= self._num_usable:
            return
        queue, blocks = self._pool.free_block_queue, self._pool.blocks
        if not self._num_usable:
            for slot in blocks[num_usable + 1 :]:
                queue.remove(slot)
                slot.ref_cnt = 1
        else:
            opened = blocks[self._num_usable + 1 : num_usable + 1]
            for slot in opened:
                slot.ref_cnt = 0
            queue.prepend_n(opened)  # empty: to be taken before a cached prefix is evicted
        self._num_usable = num_usable

    def grant(self, count: int) -> list[KVCacheBlock]:
        """Take up to `count` slots, each under one lease of the caller's.

        Returns:
            Possibly fewer than asked for, possibly none: full is normal, and then nothing else has
            changed. What a granted slot held before is forgotten.
        """
        count = min(count, self.num_free)
        try:
            return self._pool.get_new_blocks(count) if count > 0 else []
        except ValueError:  # somebody was faster; the pool raises before it takes anything (I5)
            return []

    def retire(self, slot_ids: Iterable[int]) -> list[KVCacheBlock]:
        """Never grant these slots again: the memory under them is not to be trusted (I6).

        Each is given one reference that nobody releases; leases on it stay as they are. What it
        holds can still be found until somebody forgets it.

        Returns:
            The slots that were not retired before.
        """
        retired: list[KVCacheBlock] = []
        for slot_id in slot_ids:
            if 0 <= slot_id < self._num_usable and slot_id + 1 not in self._retired:
                self._retired.add(slot_id + 1)
                retired.append(self._pool.blocks[slot_id + 1])
        self._pool.touch(retired)
        return retired

    def lease(self, slots: Sequence[KVCacheBlock]) -> None:
        """Add one lease to each slot: none of them can be evicted until it is released."""
        self._pool.touch(slots)

    def release(self, slots: Sequence[KVCacheBlock]) -> None:
        """Take one lease from each slot, given in prefix order.

        Slots that nobody else leases become evictable, the tail of the prefix before its head: a
        prefix without its head can never be hit.
        """
        for slot in slots:
            if slot.ref_cnt <= 0:
                raise InvariantError(
                    "I8", f"slot {slot_id(slot)} released more often than it was leased"
                )
        self._pool.free_blocks(reversed(slots))

    def mend(self, leases: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Give every slot the references of its leases, and one more if it is retired."""
        expected = self._count(leases)
        for slot in self._usable:
            while slot.ref_cnt > expected[slot.block_id]:
                self._pool.free_blocks([slot])
            while slot.ref_cnt < expected[slot.block_id]:
                self._pool.touch([slot])

    def _count(self, leases: Iterable[Sequence[KVCacheBlock]]) -> Counter[int]:
        """How many references each slot should have, by the id of its block in the pool."""
        expected = Counter(slot.block_id for slots in leases for slot in slots)
        expected.update(self._retired)
        return expected

    @property
    def _usable(self) -> Sequence[KVCacheBlock]:
        usable: Sequence[KVCacheBlock] = self._pool.blocks[1 : self._num_usable + 1]
        return usable

    def check_invariants(self, leases: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Compare every slot's reference count with the leases that exist (I1, I8).

        Raises:
            InvariantError: a count differs, or the free count does not match.
        """
        expected = self._count(leases)
        for slot in self._usable:
            if slot.ref_cnt != expected[slot.block_id]:
                raise InvariantError(
                    "I8",
                    f"slot {slot_id(slot)} has {slot.ref_cnt} references and "
                    f"{expected[slot.block_id]} leases or reasons to keep it",
                )
        if self._num_usable and self.num_free != sum(slot.ref_cnt == 0 for slot in self._usable):
            raise InvariantError("I8", "the free queue does not hold exactly the unleased slots")
