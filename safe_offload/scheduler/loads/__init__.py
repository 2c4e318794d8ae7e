"""Hits and loads: the search, the cost model, shared loads, admission.

Imports cache. Door: `loads.Loads`.
"""
