"""S3-FIFO, to compare with: slots wait in a small queue, and those used there go on to a large one.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache
eviction", SOSP 2023. A lease is a use; a slot keeps its place while it is leased.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from safe_offload.scheduler.eviction.policy import EvictionPolicy, Hashes

SMALL_SHARE = 0.1
USES_MAX = 3


class S3Fifo(EvictionPolicy):
    """See the module; slot by slot, and so too slow for the scheduler."""

    def __init__(self, num_slots: int, hashes: Hashes = ()) -> None:
        super().__init__(num_slots, hashes)
        self._hashes = hashes or [None] * num_slots
        self._num_slots = num_slots
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes | None, None] = OrderedDict()
        self._uses: dict[int, int] = {}  # of each slot in a queue
        self._leased: set[int] = set()  # of those in a queue

    def release(self, slots: Sequence[int], now_s: float) -> None:
        """See `EvictionPolicy`."""
        for slot in slots:
            self._leased.discard(slot)
            if slot not in self._uses:
                self._uses[slot] = 0
                block_hash = self._hashes[slot]
                is_known = block_hash is not None and block_hash in self._ghosts
                (self._main if is_known else self._small)[slot] = None
                self._ghosts.pop(block_hash, None)

    def lease(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        for slot in slots:
            if slot in self._uses:
                self._uses[slot] = min(USES_MAX, self._uses[slot] + 1)
                self._leased.add(slot)

    def hold(self, slots: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        self._leased.update(filter(self._uses.__contains__, slots))

    def evict(self, count: int, now_s: float) -> list[int]:
        """See `EvictionPolicy`."""
        count = min(count, len(self))
        evicted: list[int] = []
        num_tries = {id(self._small): len(self._small), id(self._main): len(self._main)}
        while len(evicted) < count:
            small_is_large = len(self._small) >= SMALL_SHARE * self._num_slots or not self._main
            has_main = num_tries[id(self._main)] > -len(self._main)
            use_small = self._small and num_tries[id(self._small)] > 0
            queue = self._small if use_small and (small_is_large or not has_main) else self._main
            slot, _ = queue.popitem(last=False)
            if slot in self._leased:
                queue[slot] = None
                num_tries[id(queue)] -= 1
            elif self._uses[slot]:
                self._uses[slot] = 0 if queue is self._small else self._uses[slot] - 1
                self._main[slot] = None
            else:
                del self._uses[slot]
                evicted.append(slot)
                if queue is self._small:
                    self._ghosts[self._hashes[slot]] = None
                    if len(self._ghosts) > self._num_slots:
                        self._ghosts.popitem(last=False)
        return evicted

    def __len__(self) -> int:
        return len(self._uses) - len(self._leased)
