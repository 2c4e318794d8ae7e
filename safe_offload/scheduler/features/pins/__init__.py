"""Prompts that stay on the host because a client or a hint asks, and the hints themselves.

Imports cache, scheduler and tiers. Doors: `pinned_prompts.PinnedPrompts`, `hints.Hints`.
"""
