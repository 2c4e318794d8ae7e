"""Decisions that depend on a seed and on names, and on nothing else.

Every decision of a run is drawn under a name ("copy 7 of rank 1"), not from one stream of random
numbers. So a request that is left out, when a failing run is made smaller, does not change what
happens to the others.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Chance:
    """Named random choices. `seed`: of the run."""

    def __init__(self, seed: int | str) -> None:
        self._prefix = f"{seed}/"

    def bits(self, *name: object) -> int:
        """64 random bits under a name."""
        text = self._prefix + "/".join(map(str, name))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def below(self, limit: int, *name: object) -> int:
        """A number from 0 to `limit - 1`."""
        return self.bits(*name) % limit

    def between(self, low: int, high: int, *name: object) -> int:
        """A number from `low` to `high`, both included."""
        return low + self.below(high - low + 1, *name)

    def happens(self, probability: float, *name: object) -> bool:
        return self.bits(*name) < probability * 2.0**64

    def choose(self, items: Sequence[Item], *name: object) -> Item:
        return items[self.below(len(items), *name)]

    def stream(self, *name: object) -> random.Random:
        """A stream of random numbers of its own, for decisions that belong together."""
        return random.Random(self.bits(*name))
