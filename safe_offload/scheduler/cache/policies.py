"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from safe_offload.scheduler.cache.eviction import EvictionPolicy, Slru
from safe_offload.scheduler.cache.returns import Returns

POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": EvictionPolicy,
    "slru": Slru,
    "returns": Returns,
}
"""By the name that `eviction_policy` gives; arguments are those of `EvictionPolicy`."""
