"""One host cache for all engines of a machine: the files of a pool, and the table in it.

It imports nothing of vLLM. Both processes and `safe-offload cache` use it.
"""
