"""Which tier keeps the objects of a place that a user has named, and in which namespace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from safe_offload.errors import ConfigError
from safe_offload.tier_config import TierConfig

if TYPE_CHECKING:
    from safe_offload.worker.tiers.base import Tier

Facts = Mapping[str, str]
"""Everything that gives the bytes of a rank's objects their meaning."""


def open_tier(
    config: TierConfig, slot_bytes: int, facts: Facts
) -> tuple[Tier, Callable[[str], bytes]]:
    """Return the tier of a place, and from the word of a message to the namespace.

    Nothing is read or written yet. The code of a tier is loaded only where there is one.
    """
    from safe_offload.worker.tiers.files import FileTier
    from safe_offload.worker.tiers.naming import namespace

    if config.scheme != "file":
        raise ConfigError(f'there is no tier for "{config.scheme}". Fix: write a "file:///" url.')
    return FileTier(config, slot_bytes, facts), lambda word: namespace(facts, word)


OpenTier = Callable[[TierConfig, int, Facts], "tuple[Tier, Callable[[str], bytes]]"]
