"""Every error that safe_offload raises on purpose.

A message says what was expected, what was found, and how to fix it. Nothing is imported here, so
that every other module may import this one.
"""


class SafeOffloadError(Exception):
    """Anything that safe_offload itself reports as wrong."""


class ConfigError(SafeOffloadError, ValueError):
    """A setting that cannot be used; raised while the engine starts, never later.

    It is a `ValueError` too, because vLLM expects that of a bad setting.
    """


class ProtocolError(SafeOffloadError):
    """The two processes, or vLLM and the connector, disagree about what a message means."""


class TransferError(SafeOffloadError):
    """A copy between device and host that did not deliver the right bytes.

    Its transfer catches it and fails with `reason`, and the tokens are recomputed (I6, I7).

    Args:
        reason: why, as a member of an enum (`FailureReason` in protocol.py) or its name.
        detail: what was expected and what was found.
    """

    def __init__(self, reason: object, detail: str) -> None:
        # Both go into args, so that the error survives pickling between processes.
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        """Return `reason: detail`, the reason by its enum name where it has one."""
        return f"{getattr(self.reason, 'name', self.reason)}: {self.detail}"


class DeviceError(SafeOffloadError):
    """A call that the driver of a GPU refused."""


class CaptureError(DeviceError):
    """A call that the driver refused because a CUDA graph is being captured; it may work later."""


class SharingError(SafeOffloadError):
    """Ranks that hold the same KV cache cannot keep one copy of it; each keeps one of its own."""


class StalledError(SafeOffloadError):
    """Another process holds what is waited for, and does not go on: it may have been stopped."""


class InvariantError(SafeOffloadError):
    """One of the promises "I1" to "I14" does not hold: a defect of safe_offload itself."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(invariant, detail)
        self.invariant = invariant
        self.detail = detail

    def __str__(self) -> str:
        """Return the message, which starts with the number of the invariant."""
        return f"{self.invariant}: {self.detail}"
