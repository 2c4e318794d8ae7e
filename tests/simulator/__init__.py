"""A deterministic simulator: vLLM's real scheduler, our real code, virtual time, one seed."""
