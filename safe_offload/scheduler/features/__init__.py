"""Optional features of the scheduler side: each a `feature.Feature` that knows no other.

Imports cache, loads, node, scheduler. Doors: `node.NodePool`, `events.Events`.
"""
