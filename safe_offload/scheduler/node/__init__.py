"""The lots of a pool that all engines of a machine share.

Imports cache. Door: `lots.NodeLots`.
"""
