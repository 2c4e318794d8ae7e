"""Ways to copy between GPU blocks and host slots, and their test at the start.

Imports memory. Door: `choice`.
"""
