"""Which tier keeps the objects of a place that a user has named, and in which namespace."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from safe_offload.config.tier_url import BUCKETS, FILE, SERVERS
from safe_offload.config.tiers import TierConfig

if TYPE_CHECKING:
    from safe_offload.tiers.base import Tier

Facts = MutableMapping[str, str]
"""What the bytes of a rank's objects depend on; complete when a namespace is asked for."""


def open_tier(
    config: TierConfig, slot_bytes: int, facts: Facts
) -> tuple[Tier, Callable[[str], bytes]]:
    """Return the tier of a place, and what makes a namespace of the generation of a message.

    Only the file with its key is read yet. The code of a tier is loaded only where there is one.

    Raises:
        ConfigError: a package is missing, or a file that is named cannot be used.
    """
    from safe_offload.tiers.naming import namespace
    from safe_offload.tiers.seal import open_seal

    scheme = config.location.scheme
    seal = open_seal(config.hmac_key_file)
    facts = ChainMap(dict(seal.facts), facts)
    tier: Tier
    if scheme == FILE:
        from safe_offload.tiers.files.tier import FileTier

        tier = FileTier(config, slot_bytes, facts, seal)
    elif scheme in SERVERS:
        from safe_offload.tiers.valkey.tier import ValkeyTier

        tier = ValkeyTier(config, facts, seal)
    else:
        assert scheme in BUCKETS
        from safe_offload.tiers.objects.tier import ObjectTier

        tier = ObjectTier(config, facts, seal)
    return tier, lambda generation: namespace(facts, generation)


OpenTier = Callable[[TierConfig, int, Facts], "tuple[Tier, Callable[[str], bytes]]"]
