"""From a prompt to a load: hits, the cost model, shared loads, admission.

Imports cache. Door: `loads.Loads`.
"""
