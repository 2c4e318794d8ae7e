"""`safe-offload doctor`: what would go wrong with a server on this machine, found before it starts.

May import anything but the other commands. Door: `command`.
"""
