"""The side of the connector that lives in the engine-core process: pure Python, synchronous."""
