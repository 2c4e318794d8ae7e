"""A server or cluster of Valkey or Redis as a store.

Imports of tiers only what all of them have in common. Door: `valkey_store.ValkeyStore`.
"""
