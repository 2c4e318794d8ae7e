"""Hit rates of other host sizes, for models whose hits need windows or states at their end."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from safe_offload.scheduler.cache.hit_curve import FACTORS, Curve

NUM_KEPT_MAX = 1 << 15


class EndCurve(Curve):
    """Simulated caches of several sizes, in which a hit ends at the last end that is held.

    Blocks of attention are sampled: they determine the memory of prompts, and where these diverge.
    Ends are few and not sampled. The blocks before an end are used with it, so they are held, too.

    Bound: a cache for each size, see `_Cache`.

    Args:
        num_slots: of all groups together.
        blocks_per_hash: slots of full attention per hash of a prompt; 0 without full attention.
        needs: by group of windows or states, the blocks that an end needs, and the hashes of a
            block.
        align: hits end after a multiple of this number of hashes.
    """

    def __init__(
        self, num_slots: int, blocks_per_hash: float, needs: Sequence[tuple[int, float]], align: int
    ) -> None:
        super().__init__(max(1, round(num_slots / (blocks_per_hash or 1))))
        self._needs = needs
        self._align = align
        # Of a prompt that windows have not slid past, all blocks are there, and any can be the end.
        self._head = min(int((number - 1) * size) for number, size in needs)
        self._key_slots = blocks_per_hash / self._rate
        self.caches = [_Cache(num_slots * factor) for factor in (*FACTORS.values(), math.inf)]

    def see(self, hashes: Sequence[bytes], num_usable: int, ends: Iterable[int]) -> None:
        prompt_end = num_usable - num_usable % self._align
        places = self._sample(hashes)
        everything = self.caches[-1].ends
        usable = enumerate(hashes[:prompt_end], 1)
        known = [at for at, block in usable if block in everything and not at % self._align]
        requested = len(hashes) * self._rate
        for index, cache in enumerate(self.caches):
            held = [place for place in known if hashes[place - 1] in cache.ends]
            hit = held[-1] if held else 0
            self._count(index, hit * self._rate, requested, requested)
            last = hit
            for place in sorted({self._parted(cache, hashes, places, ends), prompt_end}):
                first = 1 if place <= self._head else place
                for end in range(max(first, last + 1), place + 1):
                    cache.use(hashes[end - 1], self._end_slots(end - last), is_end=True)
                    last = end
            if hit:
                cache.use(hashes[hit - 1], 0, is_end=True)
        self._use(hashes, places)

    def keep(self, hashes: Sequence[bytes]) -> None:
        self._use(hashes, self._sample(hashes))

    def _parted(
        self, cache: _Cache, hashes: Sequence[bytes], places: Sequence[int], ends: Iterable[int]
    ) -> int:
        """Return the end of the held attention blocks: between two sampled ones, at a known end."""
        parted, end_max = 0, len(hashes)
        for place in places:
            if hashes[place] not in cache.blocks:
                end_max = place
                break
            parted = place + 1
        parted = max([parted, *(end for end in ends if end <= end_max)])
        return parted - parted % self._align

    def _end_slots(self, num_hashes: int) -> float:
        return sum(min(number, math.ceil(num_hashes / size)) for number, size in self._needs)

    def _use(self, hashes: Sequence[bytes], places: Sequence[int]) -> None:
        for cache in self.caches:
            for place in reversed(places):
                cache.use(hashes[place], self._key_slots, is_end=False)
            cache.trim()


class _Cache:
    """Blocks and ends of prompts with their numbers of slots, least recently used first.

    Bound: `NUM_KEPT_MAX` entries.
    """

    def __init__(self, num_slots: float) -> None:
        self.ends: set[bytes] = set()
        self.blocks: set[bytes] = set()
        self.slots: OrderedDict[tuple[bytes, bool], float] = OrderedDict()
        self.num_free = num_slots

    def use(self, block: bytes, num_slots: float, *, is_end: bool) -> None:
        key = block, is_end
        if key not in self.slots:
            self.slots[key] = num_slots
            self.num_free -= num_slots
            (self.ends if is_end else self.blocks).add(block)
        self.slots.move_to_end(key)

    def trim(self) -> None:
        while self.num_free < 0 or len(self.slots) > NUM_KEPT_MAX:
            (block, is_end), num_slots = self.slots.popitem(last=False)
            self.num_free += num_slots
            (self.ends if is_end else self.blocks).remove(block)
