"""Benchmarks that only developers run; see docs/benchmarks.md."""
