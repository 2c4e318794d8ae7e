"""Waiting for another thread, with an end."""

import os
import time
from collections.abc import Callable

PATIENCE_S = float(os.environ.get("SAFE_OFFLOAD_TEST_PATIENCE_S", "250"))
"""A slow machine must not break a test; a mutant that hangs one is waited for less long."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which another thread brings about."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)
