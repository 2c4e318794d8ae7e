"""What bytes mean: every fact that could change them, as one digest.

Imports nothing of the worker. Door: `namespace`.
"""
