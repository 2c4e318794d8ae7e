"""From blocks that are worth keeping to slots that can be found.

Imports cache and loads' hits. Door: `stores.Stores`.
"""
