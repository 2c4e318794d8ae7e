"""What an operator sees: counters, vLLM's connector statistics, Prometheus metrics."""
