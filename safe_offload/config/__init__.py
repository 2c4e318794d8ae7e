"""What a user may write: read, checked, explained; and what may be printed of it.

Imports only errors. Door: `options.OffloadConfig`.
"""
