"""The side of the connector in each worker process: torch, threads and an event loop.

Never imports scheduler. Door: `bridge.WorkerBridge`.
"""
