"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from safe_offload.scheduler.eviction.adaptive import Adaptive
from safe_offload.scheduler.eviction.policy import EvictionPolicy, Lru, Slru
from safe_offload.scheduler.eviction.reuse import ExpectedReuse

POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "adaptive": Adaptive,
    "lru": Lru,
    "slru": Slru,
    "returns": ExpectedReuse,
}
"""By the name that `eviction_policy` gives; arguments are those of `EvictionPolicy`."""
