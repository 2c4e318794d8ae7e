"""`safe-offload doctor`: finds problems of a server on this machine before it starts.

May import anything but the other commands. Door: `command`.
"""
