"""How far `safe-offload cache` has come, on a terminal, and what it says when Ctrl-C ends it."""

import os
import pty
import signal
import sys

import pytest

from safe_offload.commands import progress
from safe_offload.commands.cache.place import Place
from safe_offload.config.units import format_bytes
from tests.commands.cache.calls import STORED_BYTES

ERASE = "\r\x1b[K"


class Terminal:
    """A terminal, and what was written to it."""

    def __init__(self):
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w")

    def lines(self):
        """Return what was written since, one line for each time it was written over."""
        self.stream.write("\0")
        self.stream.flush()
        written = b""
        while not written.endswith(b"\0"):
            written += os.read(self._ours, 1 << 16)
        return written[:-1].decode().split(ERASE)[1:]

    def close(self):
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch):
    """Standard error, on which every change is written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(progress, "INTERVAL_S", -1.0)
    terminal = Terminal()
    yield terminal
    terminal.close()


def written(terminal, monkeypatch, call, *arguments):
    """Run a command; return its output, and the lines on the terminal."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    status, text = call(*arguments)
    monkeypatch.undo()
    assert status == 0
    lines = terminal.lines()
    assert not lines or lines[-1] == "", "the line is taken away"
    return text, lines[:-1]


def told(what, count, more=""):
    return f"{what}: {count} objects, {format_bytes(count * STORED_BYTES)}{more}"


def test_a_check_counts_bad_objects_too(rig, call, terminal, monkeypatch):
    rig.write(rig.name(3), b"x" * STORED_BYTES)
    text, lines = written(terminal, monkeypatch, call, "verify", rig.url, "--delete")
    assert lines[0] == told("checking", 1)
    assert lines[-1] == told("checking", 13, ", 1 bad")
    assert len(lines) == 13
    assert "13 objects" in text


def test_it_is_written_five_times_a_second_at_most_and_never_on_a_second_line(
    terminal, monkeypatch
):
    now_s = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(progress, "INTERVAL_S", 0.2)
    monkeypatch.setenv("COLUMNS", "20")
    with progress.Progress("checking", terminal.stream) as shown:
        for _ in range(60):
            now_s[0] += 0.05
            shown.advance(1, 1 << 40)
        lines = terminal.lines()
    assert 10 <= len(lines) <= 15
    assert {len(line) for line in lines} == {19}


def test_a_terminal_that_cannot_go_back_gets_nothing(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with progress.Progress("checking", terminal.stream) as shown:
        shown.advance(1, 1)
    assert terminal.lines() == []


def test_nothing_is_written_with_json_or_elsewhere(folder, call, terminal, monkeypatch, capsys):
    _, lines = written(terminal, monkeypatch, call, "ls", folder.url, "--json")
    assert lines == []
    call("verify", folder.url)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_ctrl_c_ends_it_in_one_line_that_says_what_is_done(rig, call, monkeypatch, more):
    check, num_checked = Place.problem_of, 0

    def problem_of(*arguments):
        nonlocal num_checked
        num_checked += 1
        if num_checked == 6:
            signal.raise_signal(signal.SIGINT)
        return check(*arguments)

    rig.write(rig.name(3), b"x" * STORED_BYTES)
    monkeypatch.setattr(Place, "problem_of", problem_of)
    status, text = call("verify", rig.url, *more)
    assert status == 130
    size = format_bytes(5 * STORED_BYTES)
    begin = f"safe-offload: ended by Ctrl-C while checking, after 5 objects, {size}"
    assert text in (f"{begin}.\n", f"{begin}, 1 bad.\n")


def test_ctrl_c_ends_rm_and_what_is_left_can_be_used(folder, call, monkeypatch):
    from safe_offload.tiers.files import upkeep

    delete, num_deleted = upkeep.delete, 0

    def interrupted(*arguments):
        nonlocal num_deleted
        num_deleted += 1
        if num_deleted == 3:
            signal.raise_signal(signal.SIGINT)
        return delete(*arguments)

    monkeypatch.setattr(upkeep, "delete", interrupted)
    status, text = call("rm", folder.url, "--all")
    assert (status, num_deleted) == (130, 3)
    assert text.startswith("safe-offload: ended by Ctrl-C while deleting, after ")
    assert call("rm", folder.url, "--all")[0] == 0
    assert folder.there() == [False] * 10
