"""Hit rates of other host sizes, estimated from a sample of blocks.

Source: C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, "Efficient MRC construction with SHARDS",
FAST 2015: keys are sampled by their hash, with a correction for the most frequent.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence

NUM_SAMPLED = 1024  # keys of the sampled cache of the present size; more above 262,144 slots
NUM_SEEN_MAX = 8192  # sampled keys that are remembered however long ago they were seen
NUM_REQUESTED_MAX = 1 << 19  # sampled keys that count; what is older counts half, and so on
FACTORS = {"half": 0.5, "present": 1.0, "double": 2.0, "quadruple": 4.0}
NO_RATES = {f"estimated_hits_{size}": 0.0 for size in (*FACTORS, "everything")}


class Curve:
    """Requested and held blocks by host size; the last size is unlimited."""

    def __init__(self, num_slots: int) -> None:
        # All is mutable, and only `see` and `keep` change it.
        num_values = max(1, min(256, round(256 * NUM_SAMPLED / num_slots)))
        self._rate = num_values / 256
        values = b"".join(b"\\x%02x" % value for value in range(num_values))
        self._sampled = re.compile(b"[" + values + b"]")
        self._held, self._requested, self._expected = ([0.0] * len(NO_RATES) for _ in range(3))

    def see(self, hashes: Sequence[bytes], num_usable: int, ends: Iterable[int]) -> None:
        """Look a prompt up.

        Args:
            num_usable: leading blocks, without that of the last token, which is always computed.
            ends: known numbers of blocks after which hits end, besides all its blocks.
        """
        raise NotImplementedError

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Add the blocks of an ended request, including its output."""
        raise NotImplementedError

    def _sample(self, hashes: Sequence[bytes]) -> list[int]:
        if not hashes:
            return []
        size = len(hashes[0])
        last_bytes = b"".join(hashes)[size - 1 :: size]
        return [found.start() for found in self._sampled.finditer(last_bytes)]

    def _count(self, index: int, held: float, requested: float, expected: float) -> None:
        self._held[index] += held
        self._requested[index] += requested
        self._expected[index] += expected
        if self._requested[index] > NUM_REQUESTED_MAX:
            self._halve(index)

    def _halve(self, index: int) -> None:
        for totals in (self._held, self._requested, self._expected):
            totals[index] /= 2

    def rates(self) -> dict[str, float]:
        """Return the hit rate by size, named as gauges."""
        rates = map(_rate, self._held, self._requested, self._expected)
        return dict(zip(NO_RATES, rates, strict=True))


class HitCurve(Curve):
    """Simulated LRU caches of several sizes, for a sample of the keys.

    A prompt is looked up, then used from its tail to its head, as real slots are. So no block
    outlasts its predecessor, and each key can be checked alone although only a leading run is a
    hit.

    Bound: the entries of the simulated caches, and `NUM_SEEN_MAX` keys.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._sizes = [max(1, round(num_slots * self._rate * f)) for f in FACTORS.values()]
        self._caches: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in FACTORS]
        self._seen: set[bytes] = set()
        self._seen_values = _NUM_VALUES  # below it is the value of a key that is remembered

    def see(self, hashes: Sequence[bytes], num_usable: int = 0, ends: Iterable[int] = ()) -> None:
        keys = [hashes[place] for place in self._sample(hashes)]
        expected = len(hashes) * self._rate
        for index, cache in enumerate(self._caches):
            self._count(index, sum(map(cache.__contains__, keys)), len(keys), expected)
        kept = self._kept(keys)
        expected *= self._seen_values / _NUM_VALUES
        self._count(-1, sum(map(self._seen.__contains__, kept)), len(kept), expected)
        self._use(keys)

    def keep(self, hashes: Sequence[bytes]) -> None:
        self._use([hashes[place] for place in self._sample(hashes)])

    def _use(self, keys: Sequence[bytes]) -> None:
        for cache, size in zip(self._caches, self._sizes, strict=True):
            for key in reversed(keys):
                cache[key] = None
                cache.move_to_end(key)
            while len(cache) > size:
                cache.popitem(last=False)
        self._seen.update(self._kept(keys))
        while len(self._seen) > NUM_SEEN_MAX and self._seen_values > 1:
            self._seen_values //= 2
            self._seen = set(self._kept(self._seen))
            self._halve(-1)  # what was counted weighs as much as what will be

    def _kept(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key for key in keys if _value(key) < self._seen_values]


_NUM_VALUES = 1 << 16


def _value(key: bytes) -> int:
    return int.from_bytes(key[-3:-1], "big")


def _rate(held: float, requested: float, expected: float) -> float:
    # A key that all prompts have is sampled or is not: what it adds or takes is hits.
    return min(1.0, max(0.0, (held + expected - requested) / expected)) if expected else 0.0
