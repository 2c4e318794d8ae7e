"""Mooncake Store, memory of other machines over RDMA or TCP, as a tier.

Imports of tiers only what all of them have in common. Door: `mooncake_store.MooncakeStore`.
"""
