"""The settings of users: reading, checking and printing them without secrets.

Imports only errors. Door: `options.OffloadConfig`.
"""
