"""Repeats at the end of the output why a process of the engine refused to start.

When one of the engine's processes refuses, each process that waits for it prints a traceback, and
the message is lost in hundreds of lines. So the process that the user starts makes a pipe first,
and prints what came through when it exits. The others find the pipe by an environment variable,
which every child inherits, forked or spawned. The pipe has no name and ends with its processes.

Source: proc_pid_fd(5): opening `/proc/<pid>/fd/<number>` of a pipe opens that pipe. Its link reads
`pipe:[inode]`, which no other file has, also if a container has a process of the same number.
"""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

from safe_offload.errors import ConfigError

VARIABLE: Final = "SAFE_OFFLOAD_START_ERRORS"
# A write of at most this size is not mixed with another one. Source: pipe(7), PIPE_BUF.
_MESSAGE_BYTES_MAX: Final = 4096
_PIPE_BYTES: Final = 1 << 16

Function = TypeVar("Function", bound=Callable[..., Any])
_read_end: int | None = None


def listen() -> None:
    """Make the pipe and print at exit what came through; a second call forgets what came before."""
    global _read_end
    if _read_end is not None:
        _messages(_read_end)
        return
    with contextlib.suppress(OSError):
        _read_end, write_end = os.pipe()
        os.set_blocking(_read_end, False)
        pipe = os.readlink(f"/proc/self/fd/{write_end}")
        os.environ[VARIABLE] = f"{os.getpid()} {write_end} {pipe}"
        atexit.register(_repeat, os.getpid(), _read_end)


def telling(function: Function) -> Function:
    """Send a ConfigError of this function to the process that listens, if there is one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            _tell(str(error))
            raise

    return cast("Function", call)


def is_another_listening() -> bool:
    """Return whether a process that started this one, directly or not, listens."""
    return _others_pipe() is not None


def _others_pipe() -> str | None:
    """Return the path of another process's pipe, if that process still has it open."""
    pid, _, rest = os.environ.get(VARIABLE, "").partition(" ")
    number, _, pipe = rest.partition(" ")
    path = f"/proc/{pid}/fd/{number}"
    if not pipe.startswith("pipe:") or pid == str(os.getpid()):
        return None
    try:
        return path if os.readlink(path) == pipe else None
    except OSError:
        return None


def _tell(message: str) -> None:
    path = _others_pipe()
    if path is None:
        return
    line = message.replace("\n", " ").encode(errors="replace")[: _MESSAGE_BYTES_MAX - 1] + b"\n"
    with contextlib.suppress(OSError):
        write_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(write_end, line)
        finally:
            os.close(write_end)


def _repeat(pid: int, read_end: int) -> None:
    if os.getpid() != pid:
        return  # a child that was forked
    for message in _messages(read_end):
        print(f"SafeCPUOffloadConnector aborted the start: {message}", file=sys.stderr, flush=True)


def _messages(read_end: int) -> Iterator[str]:
    """Return what came through the pipe, each message once: every rank sends the same."""
    try:
        text = os.read(read_end, _PIPE_BYTES).decode(errors="replace")
    except OSError:  # nothing has come
        text = ""
    return iter(dict.fromkeys(text.splitlines()))
