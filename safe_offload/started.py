"""The start time of this process, on the clock of file timestamps.

That clock may be set while an engine starts, so it is also read when this module is imported, which
the plugin does before a model is loaded.
"""

import os
import time
from pathlib import Path
from typing import Final


def _booted_ns() -> int:
    """Return the machine's boot time by the present clock; it changes when the clock is set."""
    up_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.time_ns() - up_ns


_BOOTED_AT_IMPORT_NS: Final = _booted_ns()


def process_started_ns() -> int:
    """Return the start time of this process: files that change later have later timestamps.

    Linux reports the tick of the start. This is the end of that tick: no process loads a model in
    its first tick, and a file written just before the start did not change after it.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) + 1
    up_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return up_ns + min(_BOOTED_AT_IMPORT_NS, _booted_ns())
