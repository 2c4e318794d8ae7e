"""KV cache offloading to host memory for vLLM that never crashes, hangs or corrupts the engine.

`SafeCPUOffloadConnector` is loaded by vLLM through the entry point in `start/plugin.py`; importing
this package alone imports neither vLLM nor torch.
"""

__version__ = "0.1.0"
