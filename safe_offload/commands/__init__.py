"""The command line: `safe-offload config`, `doctor`, `cache`, `bench engine`.

May import anything; nothing imports it. Door: `cli.main`.
"""
