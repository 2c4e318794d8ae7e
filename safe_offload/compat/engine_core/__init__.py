"""Methods of vLLM's EngineCore and Scheduler that are wrapped in engines with this connector.

Imports `wrapping`. Doors: `live_weights`, `pauses`, `resets`, `step_loads`.
"""
