"""`safe-offload cache`: what a tier holds, shown, checked and deleted while engines use it.

Imports tiers. Door: `command`.
"""
