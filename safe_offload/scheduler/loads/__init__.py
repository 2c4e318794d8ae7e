"""From a prompt to a load: hits, what pays, who waits for whom, who is admitted.

Imports cache. Door: `loads.Loads`.
"""
