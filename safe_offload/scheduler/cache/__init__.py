"""What the host holds, who may find it, and what is evicted.

Imports nothing else of the scheduler side. Doors: `directory.Directory`, `leases.LeaseBook`.
"""
