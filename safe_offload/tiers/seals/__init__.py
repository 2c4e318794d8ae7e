"""By what an object is known to be ours: its header, checksum, seal and encryption.

Imports the names of objects and their headers, and no place. Door: `keys`.
"""
