"""What `safe-offload bench` runs, and the tiny models that demo, benchmarks and tests run on."""
