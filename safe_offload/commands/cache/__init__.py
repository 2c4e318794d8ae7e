"""`safe-offload cache`: lists and deletes objects of a tier while engines use it.

Imports tiers. Door: `command`.
"""
