"""A tier in a process of its own, whose Python takes none of the engine's GIL.

Imports of tiers what a tier is, and how one is opened. Doors: `process_tier.opener`,
`child.main`, `child_process.ChildProcess`.
"""
