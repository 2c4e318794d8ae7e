"""Stores: which blocks are copied to the host, when, and how they become hits.

Imports cache and loads' hits. Door: `stores.Stores`.
"""
