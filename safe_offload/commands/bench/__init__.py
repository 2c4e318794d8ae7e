"""`safe-offload bench`: what the connector is worth here with your model.

May import anything but the other commands. Door: `engine`.
"""
