"""The cache key of a rank: every fact that could change the bytes of its blocks.

Imports nothing of the worker. Door: `namespace_facts`.
"""
