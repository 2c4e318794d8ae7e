"""A server or cluster of Valkey or Redis as a tier.

Imports of tiers only what all of them have in common. Door: `tier.ValkeyTier`.
"""
