"""Host memory: allocated, shared between ranks, page-locked, placed.

Imports nothing else of the worker. Door: `host_memory.HostMemory`.
"""
