"""One host cache for all engines of a machine: the files of a pool, and the table in it.

Imports no other folder. Doors: `pools` and `table`.
"""
