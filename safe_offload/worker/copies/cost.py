"""The cost of a copy by a path, learned from a few timed copies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """A copy that was timed, by its byte ranges, neighbours joined."""

    num_ranges: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that copies take in one direction by one path.

    A copy takes as long as a small one, plus the time of its further ranges or bytes, whichever is
    longer: the driver spends about as long on a range as on 8 KiB.
    """

    small: Timed
    range_s: float
    byte_s: float

    @classmethod
    def learn(cls, timed: list[Timed]) -> Cost | None:
        """Learn from a small copy, one of many ranges and one of many bytes in few ranges.

        None if no two of them differ in ranges or bytes.
        """
        small = min(timed, key=lambda one: one.size_bytes)
        most = max(timed, key=lambda one: (one.num_ranges, one.size_bytes))
        longest = max(timed, key=lambda one: (one.size_bytes / one.num_ranges, one.size_bytes))
        num_ranges = most.num_ranges - small.num_ranges
        num_bytes = longest.size_bytes - small.size_bytes
        if num_ranges <= 0 or num_bytes <= 0:
            return None
        return cls(
            small,
            max(0.0, most.seconds - small.seconds) / num_ranges,
            max(0.0, longest.seconds - small.seconds) / num_bytes,
        )

    def of(self, num_ranges: int, size_bytes: int) -> float:
        """Return the seconds that a copy is expected to take."""
        by_ranges = (num_ranges - self.small.num_ranges) * self.range_s
        by_bytes = (size_bytes - self.small.size_bytes) * self.byte_s
        return self.small.seconds + max(0.0, by_ranges, by_bytes)
