"""The line that says how far a long command has come, on a terminal of a test's own."""

import io
import os
import pty
import struct
from collections.abc import Iterator
from fcntl import ioctl
from termios import TIOCSWINSZ
from typing import TextIO

import pytest

from safe_offload.commands.progress import Progress

ERASE = "\r\x1b[K"


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal:
    """A terminal, so many columns wide, and what was written to it."""

    def __init__(self, columns: int) -> None:
        self._master, self._slave = pty.openpty()
        ioctl(self._slave, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream: TextIO = os.fdopen(self._slave, "w")

    def lines(self) -> list[str]:
        """Return what was written since, one line for each time it was written over."""
        self.stream.write("\0")
        self.stream.flush()
        written = b""
        while not written.endswith(b"\0"):
            written += os.read(self._master, 1 << 16)
        return written[:-1].decode().split(ERASE)[1:]

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(80)
    yield terminal
    terminal.close()


def test_objects_bytes_share_time_left_and_rate_are_shown(terminal):
    clock = Clock()
    with Progress("checking", total=400, stream=terminal.stream, clock=clock) as progress:
        clock.now_s += 10
        progress.advance(100, 50 << 20)
        assert terminal.lines() == [
            "checking: 100 objects, 50.00 MiB, 25% of 400, 30 s left, 5.00 MiB/s"
        ]
    assert terminal.lines() == [""], "the line is taken away"
    assert str(progress) == "100 objects, 50.00 MiB"


def test_without_a_total_and_bytes_there_is_the_rate_of_what_is_counted(terminal):
    clock = Clock()
    with Progress("listing", unit="keys", stream=terminal.stream, clock=clock) as progress:
        clock.now_s += 2
        progress.advance(5000)
        assert terminal.lines() == ["listing: 5,000 keys, 2,500 keys/s"]


def test_it_is_written_five_times_a_second_at_most(terminal):
    clock = Clock()
    with Progress("checking", stream=terminal.stream, clock=clock) as progress:
        for _ in range(60):
            clock.now_s += 0.05
            progress.advance()
        assert 10 <= len(terminal.lines()) <= 15


def test_a_narrow_terminal_gets_no_second_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for columns in (10, 20, 40, 60):
        terminal, clock = Terminal(columns), Clock()
        progress = Progress("checking", total=10**6, stream=terminal.stream, clock=clock)
        clock.now_s += 10
        progress.advance(10**5, 1 << 40)
        (line,) = terminal.lines()
        assert line.startswith("checking")
        assert len(line) < columns
        terminal.close()


def test_what_is_no_terminal_gets_nothing(monkeypatch, terminal):
    clock, stream = Clock(), io.StringIO()
    with Progress("checking", stream=stream, clock=clock) as progress:
        clock.now_s += 10
        progress.advance()
    assert stream.getvalue() == ""
    monkeypatch.setenv("TERM", "dumb")
    with Progress("checking", stream=terminal.stream, clock=clock) as progress:
        clock.now_s += 10
        progress.advance()
    assert terminal.lines() == []
