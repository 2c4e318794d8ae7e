"""Eviction policies: the order in which the host's slots are overwritten.

Imports nothing else of the scheduler side. Door: `policies.POLICIES`.
"""
