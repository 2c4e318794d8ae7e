"""Differences between vLLM 0.31, 0.32 and 0.33, by subject, and wrappers of vLLM's methods.

Imports config and layout. Doors: `base`, `specs`, all others; the rest fits any vLLM.
"""
