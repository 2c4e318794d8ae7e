"""Pinned prompts, and hints of routers and agents.

Imports cache, scheduler and tiers. Doors: `pinned_prompts.PinnedPrompts`, `hints.Hints`.
"""
