"""A directory as a store: one file for each object, within a capacity.

Imports of tiers only what all of them have in common. Door: `file_store.FileStore`.
"""
