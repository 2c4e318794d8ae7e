"""The process's signal handlers, kept through calls into libraries that replace them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

_LIBC = ctypes.CDLL(None)
_LIBC.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ACTION_BYTES = 256  # at least a struct sigaction, whatever is in it; 152 with glibc


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Undo what the body does to signal handlers, on whatever thread and from whatever language.

    CUDA's run-time compiler (NVRTC 13.0) takes SIGINT and SIGTERM for itself and gives them back by
    `signal`, which sets SA_RESTART. Then a thread that waits for a lock goes on waiting when such a
    signal comes, Python's handler does not run, and an idle engine ends only when it is killed.
    """
    before = {number: _read(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, action in before.items():
            if _read(number) != action:
                _LIBC.sigaction(number, action, None)


def _read(number: int) -> bytes:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _LIBC.sigaction(number, None, action)
    return action.raw
