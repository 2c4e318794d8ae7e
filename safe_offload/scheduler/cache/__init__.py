"""The host cache: its blocks by hash, its slots, leases and eviction.

Imports eviction. Doors: `directory.Directory`, `leases.LeaseBook`.
"""
