"""Tiers on the scheduler side: lookups, fetches and spills.

Imports cache and loads. Door: `tiers.Tiers`.
"""
