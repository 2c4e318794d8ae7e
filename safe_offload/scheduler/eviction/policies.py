"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from safe_offload.scheduler.eviction.adaptive import Adaptive
from safe_offload.scheduler.eviction.policy import EvictionPolicy, Slru
from safe_offload.scheduler.eviction.returns import Returns

POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "adaptive": Adaptive,
    "lru": EvictionPolicy,
    "slru": Slru,
    "returns": Returns,
}
"""By the name that `eviction_policy` gives; arguments are those of `EvictionPolicy`."""
