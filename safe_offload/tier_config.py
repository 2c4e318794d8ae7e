"""What a user says about one tier, as both processes know it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_WAIT_S = 2.0
DEFAULT_TIER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier; the order of tiers is that in which they are asked, the nearest first.

    Attributes:
        scheme: "file".
        path: of the directory.
        capacity_bytes: of all engines that share it together; None for no limit.
        namespace: a word of the operator's, which keeps apart what would otherwise be shared.
        model_version: of the operator: weights that carry it are the same after a reset.
        stores_evicted: only what the host is about to evict is written, not all that it stores.
        write_bytes_per_s: at most so much is written; None for no limit.
        wait_s: no request waits longer for it.
        timeout_s: an operation that takes longer counts as a failure of the tier.
        num_threads: that read and write, each one object at a time.
    """

    scheme: str
    path: str
    capacity_bytes: int | None = None
    namespace: str = ""
    model_version: str = ""
    stores_evicted: bool = False
    write_bytes_per_s: int | None = None
    wait_s: float = DEFAULT_WAIT_S
    timeout_s: float = DEFAULT_TIER_TIMEOUT_S
    num_threads: int = 4
