"""When this process was started, by the clock that files are stamped with.

That clock may be set while an engine starts, so it is also looked at when this module is imported:
with the plugin, before a model is loaded.
"""

import os
import time
from pathlib import Path
from typing import Final


def _booted_ns() -> int:
    """Return when the machine was started, as the clock says now; it changes when that is set."""
    up_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.time_ns() - up_ns


_BOOTED_AT_IMPORT_NS: Final = _booted_ns()


def process_started_ns() -> int:
    """Return when this process was started: what changed later is stamped with a later time.

    Linux gives the tick in which it was started. The end of that is meant: no process loads a model
    in its first tick, and a file that was written just before the start has not changed after it.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) + 1
    up_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return up_ns + min(_BOOTED_AT_IMPORT_NS, _booted_ns())
