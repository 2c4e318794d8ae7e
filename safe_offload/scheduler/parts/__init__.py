"""What only some configurations have on the scheduler side: `part.Part`s that know no others.

Imports cache, eviction, node, scheduler and tiers. Doors: `wishes.Wishes`, `node.NodePool`.
"""
