"""Signals that reach an idle engine although a library has had its hands on them."""

from __future__ import annotations

import signal
import subprocess
import sys

IDLE_ENGINE = """
import queue, signal, sys
from safe_offload.worker.copies.device import Device
from tests.worker.copies.fake_device import FakeGpu

def end(*_):
    sys.exit("ended by the signal")

signal.signal(signal.SIGTERM, end)
gpu = FakeGpu()
gpu.open().load_kernel(16)
print("idle", flush=True)
queue.Queue().get()
"""


def test_an_engine_that_waits_for_work_ends_on_sigterm_after_a_kernel_was_compiled():
    child = subprocess.Popen(
        [sys.executable, "-c", IDLE_ENGINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "idle\n"
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate()
    finally:
        child.kill()
        child.wait()
    assert errors.endswith("ended by the signal\n")
