"""Machines for tests: network namespaces, which take root.

Two engines are on two machines where they are in two of them; addresses of the loopback interface,
127.0.0.2 and so on, are the next best.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import subprocess
from pathlib import Path

TIMEOUT_S = 250.0
_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")


class Machines:
    """Network namespaces, each with one address, joined by a bridge that this process is on too.

    Use it as a context manager, which takes them away. `count`: of them.
    """

    def __init__(self, count: int) -> None:
        self._word = secrets.token_hex(3)
        self._bridge = f"sob{self._word}"
        self.names = [f"sob{self._word}n{index}" for index in range(count)]  # of the namespaces
        net = f"10.{random.randrange(200, 250)}.{random.randrange(256)}"
        # Of the namespaces, and then that of this process.
        self.addresses = [f"{net}.{index + 2}" for index in range(count)] + [f"{net}.1"]

    @staticmethod
    def problem() -> str:
        """Return why there can be none on this machine, or nothing."""
        if os.geteuid():
            return "network namespaces take root"
        try:
            with Machines(1):
                return ""
        except (OSError, subprocess.SubprocessError) as error:
            return f"no network namespaces here: {error}"

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.addresses[-1]}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=False)):
            ours, theirs = f"so{self._word}{index}a", f"so{self._word}{index}b"
            _ip("netns", "add", name)
            _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
            _ip("link", "set", ours, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", theirs)
            _ip("-n", name, "link", "set", theirs, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for what in (
            *(("netns", "del", name) for name in self.names),
            ("link", "del", self._bridge),
        ):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _ip(*what)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)


def enter(name: str) -> None:
    """Have sockets that this thread makes from now on, and processes it starts, in a namespace."""
    with (_FOLDER / name).open() as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
