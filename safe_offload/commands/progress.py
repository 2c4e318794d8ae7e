"""The progress of a long command: one line on a terminal, overwritten; nothing elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Final, Self, TextIO

from safe_offload.config.units import format_bytes

INTERVAL_S: Final = 0.2
"""At least, between two lines."""
_ERASE: Final = "\r\x1b[K"


class Progress:
    """Counts the objects of a step, `what`, and shows the count on a terminal while it is open.

    `begin` alone changes the step, and `remark` the note after the count.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.note = ""
        self.begin(what)

    def begin(self, what: str) -> None:
        """Count another step from 0."""
        self.what = what
        self._count = self._size_bytes = 0
        self._next_s = time.monotonic() + INTERVAL_S  # a step that ends at once shows nothing

    def advance(self, count: int, size_bytes: int) -> None:
        """Count more objects."""
        self._count += count
        self._size_bytes += size_bytes
        if self._is_shown and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            # A full line makes some terminals begin another.
            line = f"{self.what}: {self}"[: shutil.get_terminal_size().columns - 1]
            self._stream.write(_ERASE + line)
            self._stream.flush()

    def remark(self, note: str) -> None:
        """Show something else too, from the next line on."""
        self.note = note

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._stream.write(_ERASE)
            self._stream.flush()

    def __str__(self) -> str:
        """Return the count, such as "1,200 objects, 3.00 GiB"."""
        size = format_bytes(self._size_bytes) if self._size_bytes else ""
        return ", ".join(filter(None, (f"{self._count:,} objects", size, self.note)))
