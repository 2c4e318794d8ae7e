"""What runs before an engine does: registers with vLLM, checks, advises.

Imports config, compat, and of the worker its memory limits and what copies prepare ahead. Door:
`plugin`, which stays light.
"""
