"""The scheduler side of a pool that all engines of a machine share.

Imports cache, stores and tiers. Door: `planner.NodePlanner`.
"""
