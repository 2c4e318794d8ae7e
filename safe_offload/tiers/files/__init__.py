"""A directory as a tier: one file for each object, within a capacity.

Imports of tiers only what all of them have in common. Door: `tier.FileTier`.
"""
