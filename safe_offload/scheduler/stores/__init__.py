"""Stores: which blocks are copied to the host, when, and how they become hits.

Imports compat, cache and loads' hits. Door: `stores.Stores`.
"""
