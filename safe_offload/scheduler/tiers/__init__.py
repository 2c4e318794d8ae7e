"""Tiers as the scheduler sees them: what is asked for, fetched and written.

Imports cache and loads. Door: `tiers.Tiers`.
"""
