"""The worker role of the connector: torch, threads and an event loop.

Never imports scheduler. Door: `bridge.WorkerBridge`.
"""
