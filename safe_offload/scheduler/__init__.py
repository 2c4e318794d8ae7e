"""The side of the connector beside vLLM's scheduler: pure Python, no I/O, no clock.

Imports neither torch, asyncio nor worker. Door: `planner.Planner`.
"""
