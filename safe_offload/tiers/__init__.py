"""Tiers: places where the bytes of host slots outlive the process, or are shared with others.

The worker, `cache` and `doctor` use it; it imports none of them. Doors: `base`, `guarded_tier`.
"""
