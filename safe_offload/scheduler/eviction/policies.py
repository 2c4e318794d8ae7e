"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from safe_offload.scheduler.eviction.policy import EvictionPolicy, Lru
from safe_offload.scheduler.eviction.reuse import ExpectedReuse

POLICIES: dict[str, Callable[..., EvictionPolicy]] = {"returns": ExpectedReuse, "lru": Lru}
"""By the value of the setting `eviction_policy`; the arguments are those of `EvictionPolicy`."""
