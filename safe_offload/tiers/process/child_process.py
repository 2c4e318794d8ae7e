"""How a process of a tier is started, watched and killed; a later call starts the next one.

Each tier has one (process/). Below that of a tier on Mooncake Store there are two more (mooncake/):
a read that has failed may go on writing to slots until its process is dead, and what this engine
gives to the store lives only as long as its process. So one moves bytes, and the other one gives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from safe_offload.threads import environment


class ChildProcess:
    """A Python program that gets descriptors as its last arguments, and can be killed at any time.

    Its environment is `variables` and ours. If it leads a group, all that it starts is killed with
    it, and Ctrl-C does not reach it. OSError, ValueError: the system refuses it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        variables: Mapping[str, str] | None = None,
        *,
        leads_group: bool = False,
    ) -> None:
        self._leads_group = leads_group
        self._popen = subprocess.Popen(
            [sys.executable, "-P", *arguments, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**(variables or {}), **environment()},
            pass_fds=descriptors,
            process_group=0 if leads_group else None,
        )
        self.pid: Final = self._popen.pid

    @property
    def status(self) -> int | None:
        """Return its exit status, once somebody has waited for it."""
        return self._popen.returncode

    def kill(self) -> None:
        """Let the kernel end it, which takes as long as it has memory to unmap."""
        if self.status is None:  # until then its number is nobody else's
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if self._leads_group else os.kill)(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return its exit status if it has ended; its group is killed before that."""
        if self.status is None and self._leads_group:
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    self.kill()
        return self._popen.poll()

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended, or after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)

    def end(self) -> int:
        """Kill it, and return its exit status when it has ended: it touches no memory any more."""
        self.kill()
        return self._popen.wait()
