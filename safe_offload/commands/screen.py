"""A page that fills the terminal and is scrolled with keys where it has more lines than that."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any, Final

_KEYS_MAX: Final = 64
_SLICE_S: Final = 0.25
"""So long at most a terminal of another size shows what was drawn for the old one."""
_KEY: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_LINE, _PAGE, _ALL = "line", "page", "all"
_MOVES: Final = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), (-1, _LINE)),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), (1, _LINE)),
    **dict.fromkeys((b"\x1b[5~", b"b"), (-1, _PAGE)),
    **dict.fromkeys((b"\x1b[6~", b" "), (1, _PAGE)),
    **dict.fromkeys((b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"g"), (-1, _ALL)),
    **dict.fromkeys((b"\x1b[F", b"\x1bOF", b"\x1b[4~", b"G"), (1, _ALL)),
}


class Page:
    """What a terminal shows of something that may have more lines; the last line says where it is.

    Attributes:
        content: something that `rich` renders; `turn_to` changes it, then it is rendered again.
        note: said in the last line too.
        first: the first line that is shown.
    """

    def __init__(self, content: Any) -> None:
        self.content = content
        self.note = ""
        self.first = 0
        self._num_shown = self._num_lines = 1

    def turn_to(self, content: Any, note: str) -> None:
        """Show something else from the next rendering on, at the same place."""
        self.content, self.note = content, note

    def press(self, keys: bytes) -> bool:
        """Scroll as keys say; return whether one of them ends it."""
        steps = {_LINE: 1, _PAGE: max(1, self._num_shown - 1), _ALL: self._num_lines}
        for key in _KEY.findall(keys):
            if key in (b"q", b"Q"):
                return True
            direction, step = _MOVES.get(key, (0, _LINE))
            self._go_to(self.first + direction * steps[step])
        return False

    def _go_to(self, first: int) -> None:
        self.first = max(0, min(first, self._num_lines - self._num_shown))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment
        from rich.text import Text

        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        self._num_lines, self._num_shown = len(lines), max(1, console.size.height - 1)
        self._go_to(self.first)
        shown = lines[self.first : self.first + self._num_shown]
        for line in (*shown, *[[]] * (self._num_shown - len(shown))):
            yield from line
            yield Segment.line()
        yield Text(self._last_line(options.max_width), style="reverse", end="", no_wrap=True)

    def _last_line(self, width: int) -> str:
        """Return what is not seen and how to get there, as far as there is room for it."""
        facts, num_below = ["q ends"], self._num_lines - self.first - self._num_shown
        if self.first or num_below > 0:
            hidden = f"{self.first} lines above, {max(0, num_below)} below"
            facts = [hidden, "q ends", "arrows, PgUp, PgDn scroll"]
        if self.note:
            facts.insert(1, self.note)
        while len(facts) > 1 and len("; ".join(facts)) > width:
            facts.pop()
        return "; ".join(facts).ljust(width)


@contextlib.contextmanager
def keyboard() -> Iterator[int | None]:
    """Let keys be read as they are pressed; None without a terminal to read them from."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def show(live: Any, page: Page, keys: int | None, wait_s: float) -> bool:
    """Scroll a page for a time; return whether the user ends it, or the terminal is gone.

    Args:
        live: a `rich.live.Live` of the page.
        keys: of `keyboard`.
    """
    if keys is None:
        time.sleep(wait_s)
        return False
    until_s, size = time.monotonic() + wait_s, live.console.size
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([keys], [], [], min(left_s, _SLICE_S))[0]:
            pressed = os.read(keys, _KEYS_MAX)
            if not pressed or page.press(pressed):
                return True
        elif live.console.size == size:
            continue
        size = live.console.size
        live.refresh()
    return False
