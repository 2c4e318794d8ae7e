"""How far a long command has come: one line on a terminal, written over; nothing elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Final, Self, TextIO

from safe_offload.config.units import format_bytes

INTERVAL_S: Final = 0.2
"""At least, between two lines."""
_WIDTH: Final = 80
_ERASE: Final = "\r\x1b[K"


class Progress:
    """Counts what is done, and shows it while it is open.

    Args:
        what: is going on, such as "checking".
        total: how much there is to do, if that is known.
        unit: what is counted.
        stream: what it is shown on, if that is a terminal; None is standard error.
        clock: the seconds of a clock that never goes back.

    Attributes:
        what: is going on; `begin` alone changes it.
        count, size_bytes: how much is done; `begin` and `advance` alone change them.
        is_shown: there is a terminal; `close` alone changes it.
        note: said too; `remark` alone changes it.
    """

    def __init__(
        self,
        what: str,
        *,
        total: int | None = None,
        unit: str = "objects",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self.note = ""
        self.is_shown = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.begin(what, total)

    def begin(self, what: str, total: int | None = None) -> None:
        """Count something else from now on."""
        self.count = self.size_bytes = 0
        self.what, self._total = what, total
        self._begun_s = self._clock()
        self._next_s = self._begun_s + INTERVAL_S  # what is over at once shows nothing

    def advance(self, count: int = 1, size_bytes: int = 0) -> None:
        """Count what has been done since."""
        self.count += count
        self.size_bytes += size_bytes
        if self.is_shown and (now_s := self._clock()) >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            self._stream.write(_ERASE + self._line(now_s - self._begun_s))
            self._stream.flush()

    def remark(self, note: str) -> None:
        """Say something else too, from the next line on."""
        self.note = note

    def close(self) -> None:
        """Take the line away; a second call does nothing."""
        if self.is_shown:
            self._stream.write(_ERASE)
            self._stream.flush()
        self.is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        """Return what is done, such as "1,200 objects, 3.00 GiB"."""
        size = format_bytes(self.size_bytes) if self.size_bytes else ""
        return ", ".join(filter(None, (f"{self.count:,} {self._unit}", size, self.note)))

    def _line(self, passed_s: float) -> str:
        """Return as many facts as one line of the terminal has room for."""
        per_s = self.count / max(passed_s, 1e-9)
        facts = [f"{self.what}: {self}"]
        if self._total:
            facts.append(f"{min(self.count / self._total, 1.0):.0%} of {self._total:,}")
            if per_s:
                facts.append(f"{_duration(max(self._total - self.count, 0) / per_s)} left")
        bytes_per_s = int(self.size_bytes / max(passed_s, 1e-9))
        facts.append(
            f"{format_bytes(bytes_per_s)}/s" if self.size_bytes else f"{per_s:,.0f} {self._unit}/s"
        )
        width = _width_of(self._stream) - 1  # a full line makes some terminals begin another
        while len(facts) > 1 and len(", ".join(facts)) > width:
            facts.pop()
        return ", ".join(facts)[:width]


def _width_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except OSError:
        return _WIDTH


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
