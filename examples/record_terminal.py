"""Run a command in a terminal and draw its output as an SVG in which lines appear as they came.

    .venv/bin/python examples/record_terminal.py docs/demo.svg --shown 'make demo' -- make -s demo

Needs `rich`. Pauses are cut to a second; a viewer that does not animate shows all lines at once.
"""

import argparse
import io
import os
import pty
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

PAUSE_S = 1.0
FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)
"""rich fetches its font from a CDN; the reader's own monospace font does."""


def main() -> None:
    """Run the command, draw its output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shown", help="the command line in the picture (the command)")
    parser.add_argument("--columns", type=int, default=118)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    shown = options.shown or " ".join(options.command)
    lines = [(0.0, f"$ {shown}"), *lines_of(options.command, options.columns)]
    options.file.write_text(draw(lines, options.columns))


def lines_of(command: list[str], columns: int) -> Iterator[tuple[float, str]]:
    """Yield each line that the command prints on a terminal, with the seconds since its start."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "60", "TERM": "xterm-256color"}
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    with open(ours, encoding="utf-8", errors="replace") as terminal:
        try:
            for line in terminal:
                print(line, end="")
                yield time.monotonic() - start, line.rstrip()
        except OSError:
            pass  # Linux ends a terminal that nobody holds with EIO
    if process.wait():
        raise SystemExit(f"the command ended with status {process.returncode}")


def draw(lines: list[tuple[float, str]], columns: int) -> str:
    """Return the lines as an SVG; each appears when its turn comes."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    shown_at_s, last_s, rules = 0.0, 0.0, []
    for number, (at_s, line) in enumerate(lines):
        shown_at_s += min(at_s - last_s, PAUSE_S)
        last_s = at_s
        text = Text.from_ansi(line)
        text.truncate(columns, overflow="ellipsis")
        console.print(text, no_wrap=True, crop=True)
        selector = f'[clip-path="url(#t-line-{number})"]'
        rules.append(f"{selector} {{{{ animation: appear 1ms {shown_at_s:.2f}s backwards }}}}")
    style = "@keyframes appear {{ from {{ opacity: 0 }} }}\n" + "\n".join(rules)
    layout = FONT_FACE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, ", "")
    layout = layout.replace("</style>", f"{style}\n    </style>")
    return console.export_svg(title="", code_format=layout, unique_id="t") + "\n"


if __name__ == "__main__":
    main()
