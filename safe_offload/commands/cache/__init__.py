"""`safe-offload cache`: lists, checks and deletes objects of a tier while engines use it.

Imports tiers. Door: `command`.
"""
