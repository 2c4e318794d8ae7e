"""Digests of files, kept for the next start and for the other ranks of a machine.

A directory has a file and a lock for each folder of files: one process reads the folder, and the
others use the digests that it kept. Without a directory, each process reads for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(f"vllm.{__name__}")

NUM_FILES_MAX: Final = 128

_PATIENCE_S: Final = 900.0
_PAUSE_S: Final = 0.05
LOG_AFTER_S = 1.0
_SIZE_BYTES_MAX: Final = 8 << 20
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Stamp = tuple[int, ...]


class Cancelled(Exception):
    """Reading was cancelled."""


class KeptDigests:
    """The kept digests of one folder; while it is entered, other processes wait for it.

    `directory` is created, and used if only we can write it; waiting for its lock calls
    `cancelled`.
    """

    def __init__(self, directory: str, root: str, cancelled: Callable[[], bool]) -> None:
        self._directory = directory
        self._name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self._cancelled = cancelled
        self._opened = contextlib.ExitStack()
        self._folder_fd: int | None = None
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}

    def get(self, path: str, stamp: Stamp) -> str:
        """Return the SHA-256 of a file with that stamp, in hex; empty if none is kept."""
        match self._before.get(path):
            case [*kept, str(digest)] if kept == [*stamp] and re.fullmatch("[0-9a-f]{64}", digest):
                self.put(path, stamp, digest)
                return digest
        return ""

    def put(self, path: str, stamp: Stamp, digest: str) -> None:
        """Keep the digest of a file; digests that are neither put nor got again are forgotten."""
        self._after[path] = [*stamp, digest]

    def __enter__(self) -> KeptDigests:
        """Wait for the lock, or raise Cancelled."""
        with contextlib.ExitStack() as opened:
            try:
                os.makedirs(self._directory, 0o700, exist_ok=True)
                self._folder_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
                opened.callback(os.close, self._folder_fd)
                _require_ours(self._folder_fd)
                self._lock(self._open("lock", os.O_RDWR | os.O_CREAT, opened))
            except (OSError, ValueError):  # a ValueError: no path can be like this
                self._folder_fd = None
            else:
                self._before = self._load()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._opened, contextlib.suppress(OSError):
            kept = self._after if kind is None else self._before | self._after
            if self._folder_fd is not None and kept != self._before:
                self._save(kept)
                self._prune()

    def _open(self, suffix: str, flags: int, opened: contextlib.ExitStack) -> int:
        file_fd = os.open(f"{self._name}.{suffix}", flags | _FLAGS, 0o600, dir_fd=self._folder_fd)
        opened.callback(os.close, file_fd)
        _require_ours(file_fd)
        return file_fd

    def _lock(self, lock_fd: int) -> None:
        log_at_s = time.monotonic() + LOG_AFTER_S
        give_up_at_s = time.monotonic() + _PATIENCE_S  # its process may have been stopped
        while True:
            try:
                return fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_at_s:
                    raise
            if time.monotonic() > log_at_s:
                log_at_s = give_up_at_s
                logger.info(
                    "Waiting for another process: hashing the model's files. It may have been "
                    "stopped; after %g s, this process hashes them too.",
                    _PATIENCE_S,
                )
            if self._cancelled():
                raise Cancelled
            time.sleep(_PAUSE_S)

    def _load(self) -> dict[str, Any]:
        broken = (OSError, ValueError, RecursionError)
        with contextlib.ExitStack() as opened, contextlib.suppress(*broken):
            file_fd = self._open("json", os.O_RDONLY, opened)
            os.utime(file_fd)  # in use: those that are not are removed
            loaded = json.loads(os.read(file_fd, _SIZE_BYTES_MAX))
            return loaded if isinstance(loaded, dict) else {}
        return {}

    def _save(self, kept: dict[str, Any]) -> None:
        suffix = f"{os.urandom(8).hex()}.tmp"
        with contextlib.ExitStack() as opened:
            file_fd = self._open(suffix, os.O_WRONLY | os.O_CREAT | os.O_EXCL, opened)
            left = memoryview(json.dumps(kept).encode())
            while left:
                left = left[os.write(file_fd, left) :]
        at = {"src_dir_fd": self._folder_fd, "dst_dir_fd": self._folder_fd}
        os.rename(f"{self._name}.{suffix}", f"{self._name}.json", **at)

    def _prune(self) -> None:
        """Remove the least recently used files, also those of killed processes."""
        assert self._folder_fd is not None
        with os.scandir(self._folder_fd) as entries:
            used = sorted((entry.stat().st_mtime_ns, entry.name) for entry in entries)
        for _, name in used[:-NUM_FILES_MAX]:
            os.unlink(name, dir_fd=self._folder_fd)


def _require_ours(opened_fd: int) -> None:
    """Raise PermissionError if others can write it."""
    found = os.fstat(opened_fd)
    is_shared = stat.S_ISREG(found.st_mode) and found.st_nlink != 1
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or is_shared:
        raise PermissionError(f"not ours alone: user {found.st_uid}, mode {found.st_mode:o}")
