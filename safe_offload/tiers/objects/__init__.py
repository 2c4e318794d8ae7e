"""A bucket of an object store as a store.

Imports of tiers only what all of them have in common. Door: `bucket_store.BucketStore`.
"""
