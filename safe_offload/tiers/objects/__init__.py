"""A bucket of an object store as a tier.

Imports of tiers only what all of them have in common. Door: `tier.ObjectTier`.
"""
