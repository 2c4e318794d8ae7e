"""`safe-offload bench engine`, and the tiny models that demo, benchmarks and tests run on.

May import anything but the other commands. Door: `engine`.
"""
