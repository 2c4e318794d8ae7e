"""Pinned prompts, and hints of routers and agents.

Imports cache, scheduler and tiers. Doors: `pins.PinnedPrompts`, `hints.Hints`.
"""
