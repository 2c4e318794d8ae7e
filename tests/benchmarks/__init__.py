"""Benchmarks that only developers run; see docs/benchmarks/method.md."""
