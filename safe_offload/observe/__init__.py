"""Metrics: counters and histograms, vLLM's connector statistics, Prometheus.

Imports config, protocol and sides. Doors: `counters.Counters`, `metrics.OffloadStats`.
"""
