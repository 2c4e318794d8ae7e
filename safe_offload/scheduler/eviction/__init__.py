"""In which order the host gives up blocks for others, and what chooses between orders.

Imports nothing else of the scheduler side. Door: `policies.POLICIES`.
"""
