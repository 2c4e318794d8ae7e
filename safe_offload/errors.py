"""The exceptions of safe_offload; a message says what was expected, what was found, and the fix."""


class SafeOffloadError(Exception):
    """Base class of all exceptions of safe_offload."""


class ConfigError(SafeOffloadError, ValueError):
    """An invalid setting, raised only while the engine starts; vLLM expects a `ValueError`."""


class ProtocolError(SafeOffloadError):
    """A malformed message between the two roles, or between vLLM and the connector."""


class TransferError(SafeOffloadError):
    """A failed copy between device and host; its tokens are recomputed (I6, I7).

    The reason is a member of `FailureReason` (protocol.py), or its name.
    """

    def __init__(self, reason: object, detail: str) -> None:
        # Both go into args, so that the error survives pickling between processes.
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{getattr(self.reason, 'name', self.reason)}: {self.detail}"


class DeviceError(SafeOffloadError):
    """A failed call of the GPU driver."""


class CaptureError(DeviceError):
    """A driver call that failed because a CUDA graph is being captured; it may be retried."""


class SharingError(SafeOffloadError):
    """Ranks with the same KV cache cannot share one host copy; each keeps its own."""


class StalledError(SafeOffloadError):
    """A lock of a shared pool stays held: the other process may have been stopped."""


class InvariantError(SafeOffloadError):
    """A violated guarantee, "I1" to "I15": a bug in safe_offload itself."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(invariant, detail)
        self.invariant = invariant
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"
