"""KV cache offloading to host memory for vLLM; importing it imports neither vLLM nor torch."""

__version__ = "0.1.0"
