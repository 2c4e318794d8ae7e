"""Real servers of Mooncake Store for tests: a master, and processes that give it memory.

They come from PyPI's mooncake-transfer-engine-non-cuda, which `make servers` installs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_offload.config.tiers import MooncakeConfig
from safe_offload.tiers.mooncake.mooncake_store import MooncakeStore
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.seals.seal import PLAIN, Seal
from tests import stopping
from tests.programs import find_program
from tests.valkey_server import LOCALHOST, free_port

START_S = 300.0
IS_UP = "the segment is up"
SEGMENT = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, size = sys.argv[1], int(sys.argv[2])
code = store.setup("127.0.0.1", "P2PHANDSHAKE", size, 1 << 20, "tcp", "", master)
print("the segment is up" if code == 0 else f"it failed with code {code}", flush=True)
signal.pause()
"""


def find_master() -> str | None:
    """Return the path of `mooncake_master`; None if it is not installed."""
    return find_program("mooncake_master")


def open_client(address: str) -> Any:
    """Return a client of Mooncake's own, with which anyone may write anything."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(LOCALHOST, "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address)
    assert code == 0, code
    return store


class _Process:
    """A process that is started, stopped and killed; its log is a file."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None

    def launch(self, command: list[str], **more: Any) -> subprocess.Popen[str]:
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=log,
                text=True,
                **({"stdout": log} | more),
            )
        return self._process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it at once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def suspend(self) -> None:
        """Let it accept connections and answer nothing (SIGSTOP)."""
        stopping.stop(self.pid)

    def resume(self) -> None:
        """Let it go on."""
        stopping.go_on(self.pid)


class Master(_Process):
    """A master; `with` starts and kills it.

    `options`: more of its flags. `port`, `metrics_port`: of its calls and of its pages.
    """

    def __init__(self, folder: Path, **options: str) -> None:
        super().__init__(folder, "master")
        self.port, self.metrics_port = free_port(), free_port()
        self._options = options

    def __enter__(self) -> Master:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Return the url of a tier."""
        return f"mooncake://{LOCALHOST}:{self.port}"

    @property
    def address(self) -> str:
        """Return the address that Mooncake's own clients want."""
        return f"{LOCALHOST}:{self.port}"

    def start(self) -> None:
        """Start it, without anything of what it knew before; return when it answers."""
        program = find_master()
        assert program is not None, "mooncake_master is not installed"
        flags = {
            "rpc_address": LOCALHOST,
            "rpc_port": str(self.port),
            "metrics_port": str(self.metrics_port),
            **self._options,
        }
        process = self.launch([program, *(f"--{name}={value}" for name, value in flags.items())])
        end_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((LOCALHOST, self.port), 1).close()
                return
            except OSError:
                has_failed = process.poll() is not None or time.monotonic() > end_s
                assert not has_failed, self.log.read_text()
                time.sleep(0.05)


class Segment(_Process):
    """A process that gives a master memory; `with` starts and kills it."""

    def __init__(self, folder: Path, master: Master, size_bytes: int = 256 << 20) -> None:
        super().__init__(folder, f"segment-{os.urandom(4).hex()}")
        self._master = master
        self._size_bytes = size_bytes

    def __enter__(self) -> Segment:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it; return when the master has it."""
        arguments = [self._master.address, str(self._size_bytes)]
        command = [sys.executable, "-c", SEGMENT, *arguments]
        process = self.launch(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        assert said == IS_UP, said or self.log.read_text()


def mooncake_tier(
    config: MooncakeConfig, facts: Mapping[str, object] | None = None, seal: Seal = PLAIN
) -> SealedTier:
    """Return the tier of an engine."""
    return SealedTier(MooncakeStore(config, 1), facts, seal)
