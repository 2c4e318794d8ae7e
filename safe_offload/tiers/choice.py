"""Opens the tier of a place that a user has named, and names its namespace."""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from safe_offload.config.tiers import KINDS, TierConfig

if TYPE_CHECKING:
    from safe_offload.tiers.base import Tier
    from safe_offload.tiers.seals.seal import Seal
    from safe_offload.tiers.store import Store

Facts = MutableMapping[str, str]
"""All that the bytes of a rank's objects depend on; complete when a namespace is named."""


def open_store(config: TierConfig, slot_bytes: int = 0) -> Store:
    """Return the store of a tier, for slots of at most `slot_bytes`, or for an operator.

    Only the code of its kind is imported. ConfigError: a package is missing, or a named file cannot
    be used.
    """
    module, _, name = KINDS[config.location.scheme].store.partition(":")
    store: Store = getattr(importlib.import_module(module), name)(config, slot_bytes)
    return store


def make_tier(config: TierConfig, slot_bytes: int, facts: Facts, seal: Seal) -> Tier:
    """Return a tier of this process."""
    from safe_offload.tiers.sealed_tier import SealedTier

    return SealedTier(open_store(config, slot_bytes), facts, seal)


def open_tier(
    config: TierConfig, slot_bytes: int, facts: Facts, make: MakeTier = make_tier
) -> tuple[Tier, Callable[[str], bytes]]:
    """Return the tier of a place, and a function from a message's generation to a namespace.

    Only its file of keys is read yet; raises as `open_store`.
    """
    from safe_offload.tiers.naming import namespace
    from safe_offload.tiers.seals.keys import open_seal

    seal = open_seal(config)
    facts = ChainMap(dict(seal.facts), facts)
    return make(config, slot_bytes, facts, seal), lambda generation: namespace(facts, generation)


MakeTier = Callable[[TierConfig, int, Facts, "Seal"], "Tier"]
OpenTier = Callable[[TierConfig, int, Facts], "tuple[Tier, Callable[[str], bytes]]"]
