"""`safe-offload bench`: what the connector is worth here with your model, and what a tier gives.

May import anything, but of the other commands only where `cache` looks. Doors: `engine`, `tier`.
"""
