"""Where `safe-offload bench tier` writes: apart from all else, and emptied however it ends.

A directory gets a folder that one run at a time has locked: the kernel frees it with its process,
so that the next run may delete what one that was killed has left. On a server or in a bucket the
objects have a namespace of their own, which `safe-offload cache` lists and removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import signal
import stat
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self, TypeVar

from safe_offload.commands.cache import places
from safe_offload.commands.cache.place import Place as OpenPlace
from safe_offload.config.tier_url import FILE, SERVERS
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.tiers.base import Name
from safe_offload.tiers.naming import namespace, namespace_folder
from safe_offload.tiers.seal import open_seal
from safe_offload.tiers.store import Item, pages

MODEL: Final = "bench tier of safe-offload"
"""What `safe-offload cache ls` shows in the place of a model."""
FOLDER: Final = "safe-offload-bench"
TTL_S: Final = 3600.0
"""What is written to a server is gone after this, however the benchmark ends."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")
_LOCK: Final = "lock"
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class EndedError(BaseException):
    """A signal ends the benchmark."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """While it is open, the first signal that ends a process is an EndedError, others are nothing.

    Its state: whether signals are held, which one came then, and what ends what runs meanwhile.
    Whatever thread takes a signal, Python's handler runs in the main one.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._pending = 0
        self._cancel: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as with nohup
                self._before[number] = before
                signal.signal(number, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal wait until what is inside has ended."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._pending:
                number, self._pending = self._pending, 0
                raise EndedError(number)

    def run(self, runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine; a signal cancels it: raised inside an event loop it could get lost."""

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            loop = asyncio.get_running_loop()
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            return await work

        with self.held():
            try:
                return runner.run(cancellable())
            finally:
                self._cancel = None

    def _end(self, number: int, _: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        # It may come between a coroutine and its beginning.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        if not self._is_held:
            raise EndedError(number)
        self._pending = number
        if self._cancel is not None:
            self._cancel()


class Place(ABC):
    """Where the benchmark writes.

    Attributes:
        config: of the tier that is measured, in this place.
        facts: of its namespace.
        keeps_all: what was written stays to the end.
        promise: what becomes of it, in words.
    """

    config: TierConfig
    facts: dict[str, str]
    keeps_all: bool
    promise: str

    @abstractmethod
    def take(self) -> None:
        """Keep others out, at once; raise a SafeOffloadError if others are there."""

    @abstractmethod
    def open(self, size_bytes: int) -> None:
        """Make sure that so many bytes can be written and deleted, or raise a SafeOffloadError."""

    @abstractmethod
    def note(self, names: Sequence[Name]) -> None:
        """Note what is about to be written."""

    @abstractmethod
    def forget(self, names: Sequence[Name]) -> None:
        """Delete what is not needed any more, unless all stays to the end."""

    def paths(self, names: Sequence[Name]) -> list[str]:
        """Return where objects are in a bucket."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Delete all that was written; a second call does nothing."""


def place_of(config: TierConfig, url: str) -> Place:
    """Return where to write to a tier; nothing is done yet."""
    return Folder(config) if config.location.scheme == FILE else Remote(config, url)


@contextlib.contextmanager
def taken(place: Place, size_bytes: int, signals: Signals) -> Iterator[None]:
    """Take a place, for so many bytes at a time, and empty it however this ends."""

    def close() -> None:
        with signals.held():
            try:
                place.close()
            except (OSError, SafeOffloadError) as error:
                print(f"Some objects were not deleted: {error} {place.promise}", file=sys.stderr)

    try:
        try:
            with signals.held():
                place.take()
            place.open(size_bytes)
            yield
        finally:
            close()
    finally:  # for a signal that came before the line above; there is no second one
        close()


class Folder(Place):
    """A folder in a directory. See `Place`.

    What a round wrote stays to the end: an ext4 without journal is slow to make files for minutes
    after many were deleted (recently_deleted in fs/ext4/ialloc.c, Linux 6.1).
    """

    keeps_all = True

    def __init__(self, config: TierConfig) -> None:
        self._parent = Path(config.location.path)
        self._folder = self._parent / FOLDER
        location = dataclasses.replace(config.location, path=str(self._folder / "tier"))
        self.config = dataclasses.replace(config, location=location)
        self.facts = {"model": MODEL}
        self.promise = (
            f"Its objects go to {self._folder} and are deleted at the end; after SIGKILL, the "
            "next run deletes them."
        )
        self._lock_fd = -1

    def take(self) -> None:
        if not self._parent.is_dir():
            raise ConfigError(f"{self._parent} is not a directory. Fix: create it on the device")
        try:
            while self._lock_fd < 0:
                self._lock_fd = self._lock()
        except OSError as error:
            raise SafeOffloadError(f"{self._folder}: {error.strerror or error}") from error

    def open(self, size_bytes: int) -> None:
        self._empty("Deleting {} left by an earlier run.")
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < size_bytes:
            raise ConfigError(
                f"{self._parent} has {format_bytes(free_bytes)} free, and the benchmark needs "
                f"{format_bytes(size_bytes)}. Fix: lower --round-bytes or --rounds"
            )

    def note(self, names: Sequence[Name]) -> None:
        """See `Place.note`: they are in the folder."""

    def forget(self, names: Sequence[Name]) -> None:
        """See `Place.forget`."""

    def close(self) -> None:
        if self._lock_fd < 0:
            return
        self._empty()
        os.unlink(self._folder / _LOCK)
        os.close(self._lock_fd)
        self._lock_fd = -1
        with contextlib.suppress(OSError):  # the next run is already in it
            os.rmdir(self._folder)

    def _lock(self) -> int:
        """Return the lock of the folder, which is made; -1 if a run that ends has deleted it."""
        lock = self._folder / _LOCK
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        try:
            found = self._folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_ours or (not lock.exists() and any(self._folder.iterdir())):
                raise ConfigError(
                    f"{self._folder} was not created by this benchmark. Fix: move it, or name "
                    "another directory"
                )
            lock_fd = os.open(lock, _LOCK_FLAGS, 0o600)
        except FileNotFoundError:
            return -1
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock_fd), lock.stat()):
                return lock_fd
        except BlockingIOError:
            os.close(lock_fd)
            raise ConfigError(
                f"another benchmark is running in {self._parent}. Fix: wait until it ends"
            ) from None
        except FileNotFoundError:
            pass
        os.close(lock_fd)
        return -1

    def _empty(self, say: str = "") -> None:
        """Delete what is in the folder beside the lock."""
        left = [path for path in self._folder.iterdir() if path.name != _LOCK]
        if left and say:
            files = (path for each in left for path in (each, *each.rglob("*")))
            held_bytes = sum(path.lstat().st_blocks * 512 for path in files)
            print(say.format(format_bytes(held_bytes)), file=sys.stderr)
        for path in left:
            shutil.rmtree(path)


class Remote(Place):
    """A namespace on a server or in a bucket. See `Place`.

    Its state: what was noted and not deleted. Each round's objects are deleted after it, since they
    take room that others have.
    """

    keeps_all = False

    def __init__(self, config: TierConfig, url: str) -> None:
        is_server = config.location.scheme in SERVERS
        self.config = dataclasses.replace(config, ttl_s=TTL_S) if is_server else config
        self.facts = {"model": MODEL, "run": secrets.token_hex(8)}
        self._url = url
        self._namespace = namespace({**self.facts, **open_seal(config.hmac_key_file).facts})
        folder, label = namespace_folder(self._namespace), config.location.label
        after = f"they expire after {TTL_S / 3600:.0f} h, or " if is_server else ""
        self.promise = (
            f"Its objects go to namespace {folder} of {label} and are deleted at the end; after "
            f"SIGKILL, {after}`safe-offload cache rm {label} {folder[:8]}` deletes them."
        )
        self._noted: dict[Name, None] = {}
        self._has_written = False
        self._there: OpenPlace | None = None

    def take(self) -> None:
        """See `Place.take`: the namespace is this run's."""

    def open(self, size_bytes: int) -> None:
        self._there = places.open_place(self._url, self.config)
        nothing = Name(self._namespace, 0, bytes(32))
        self._delete(self._there, [nothing])  # before anything is written that could not go

    def note(self, names: Sequence[Name]) -> None:
        self._has_written = True
        self._noted.update(dict.fromkeys(names))

    def forget(self, names: Sequence[Name]) -> None:
        if self._there is not None:
            self._delete(self._there, names)

    def paths(self, names: Sequence[Name]) -> list[str]:
        assert self._there is not None
        return list(map(self._there.key_of, names))

    def close(self) -> None:
        there, self._there = self._there, None
        if there is None:
            return
        try:
            if self._has_written:
                self._delete(there, list(self._noted))
                there.forget([namespace_folder(self._namespace)])
        finally:
            there.close()

    def _delete(self, there: OpenPlace, names: Iterable[Name]) -> None:
        folder = namespace_folder(self._namespace)
        for some in pages(Item(folder, there.key_of(n), n, 0, 0.0) for n in names):
            there.delete(some)
            for item in some:
                if item.name is not None:
                    self._noted.pop(item.name, None)
