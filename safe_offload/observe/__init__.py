"""What an operator sees: counters, vLLM's connector statistics, Prometheus metrics.

Imports config, protocol and sides. Doors: `counters.Counters`, `metrics.OffloadStats`.
"""
