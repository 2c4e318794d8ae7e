"""What the host holds, and who may find it.

Imports eviction. Doors: `directory.Directory`, `leases.LeaseBook`.
"""
