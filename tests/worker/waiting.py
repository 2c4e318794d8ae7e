"""Waiting for another thread, with an end."""

import time
from collections.abc import Callable

PATIENCE_S = 250.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which another thread brings about."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)
