"""Diagnoses the directory of a tier: access, file system, room, locks.

It is tried in a folder of its own, which is deleted again, in the directory or in its nearest
ancestor that exists.

Source: proc_pid_mountinfo(5), flock(2), statvfs(3).
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from safe_offload.config.tiers import FileConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.findings import Finding, error, info, ok, warning
from safe_offload.tiers.files.capacity import USAGE_FILE, Usage
from safe_offload.tiers.files.directory import NotOursError, open_root
from safe_offload.tiers.files.object_file import takes_direct
from safe_offload.tiers.naming import is_namespace_folder

NFS: Final = ("nfs", "nfs4", "cifs", "smb3")
SHARED: Final = ("lustre", "gpfs", "wekafs", "ceph", "beegfs")
MEMORY: Final = ("tmpfs", "ramfs")


def diagnose(config: FileConfig, open_ours: Callable[[str], tuple[int, int]]) -> Iterator[Finding]:
    """Yield the findings of a directory; `open_ours` refuses one that others could replace."""
    path, label = Path(config.location.path), f"file://{config.location.path}"
    nearest = existing(path)
    try:
        with suppress(FileNotFoundError):
            os.close(open_ours(str(path))[0])
        with tempfile.TemporaryDirectory(prefix="safe-offload-doctor-", dir=nearest) as folder:
            folder_fd = open_root(folder)
            try:
                uid = takes_direct(folder_fd, "direct")[1]
            finally:
                os.close(folder_fd)
            lock_problem = lock_problem_of(f"{folder}/lock")
            found = os.statvfs(folder)
        others = _other_users(path, uid)
    except OSError as problem:
        why = f"{nearest}: {problem.strerror or problem}"
        fix = "create it as vLLM's user with mode 0700, or mount the missing volume"
        if isinstance(problem, NotOursError):
            why, fix = problem.problem, problem.fix
        yield error(
            "tiers.directory",
            f"{label} cannot be used by user {os.geteuid()}: {why}",
            "a directory that this user can create and write",
            fix,
        )
        return
    if others:
        yield warning(
            "tiers.directory",
            f"{label} contains files of user {', '.join(map(str, others))}; this process is user "
            f"{uid}",
            "one user for all engines that share a directory",
            "run them as one user, or give each user a directory",
        )
    else:
        can = "can be written" if nearest == path else "does not exist yet and can be created"
        yield ok("tiers.directory", f"{label} {can} by user {uid}")
    yield file_system_finding(label, file_system_of(nearest))
    yield room_finding(config, label, found.f_bavail * found.f_frsize, _held_bytes(path))
    if lock_problem:
        yield warning(
            "tiers.lock",
            f"{label}: {lock_problem}, so `capacity` is not enforced",
            "a file system with flock",
            "mount it with locks, or use another one",
        )
    else:
        yield ok("tiers.lock", f"flock works on {label}, from this machine")


def existing(path: Path) -> Path:
    """Return a path, or its nearest ancestor that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of a path that exists; empty if unknown."""
    found: dict[Path, str] = {}
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            mount, _, source = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            found[Path(point)] = source.split()[0]  # the last one on a point hides the others
    path = path.resolve()
    return next((found[folder] for folder in (path, *path.parents) if folder in found), "")


def _other_users(path: Path, uid: int) -> list[int]:
    with suppress(FileNotFoundError):
        names = filter(is_namespace_folder, os.listdir(path))
        return sorted({os.lstat(path / name).st_uid for name in names} - {uid})
    return []


def _held_bytes(path: Path) -> int:
    """Return the bytes that the tier holds already; 0 if they have not been counted."""
    with suppress(OSError):
        usage_fd = os.open(path / USAGE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            usage = Usage.read(usage_fd)
        finally:
            os.close(usage_fd)
        return 0 if usage is None else usage.taken_bytes
    return 0


def lock_problem_of(path: str) -> str:
    """Return the defect of file locks, which enforce the capacity; empty if there is none."""
    opened = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) for _ in range(2)]
    try:
        for lock_fd in opened:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as problem:
        return f"flock fails: {problem.strerror}"
    finally:
        for lock_fd in opened:
            os.close(lock_fd)
    return "flock grants one lock twice"


def file_system_finding(label: str, kind: str) -> Finding:
    """Judge the type of the file system that a tier is on."""
    id, is_on = "tiers.file-system", f"{label} is on {kind or 'a file system of unknown type'}"
    if kind in NFS:
        return warning(
            id,
            f"{is_on}, which is rarely faster than recomputing",
            "a local NVMe, a tmpfs, or a parallel file system",
            'place it elsewhere, or watch "tier_wait_seconds"',
        )
    if kind == "overlay":
        return warning(
            id,
            f"{is_on}, the container's own layer, which is lost with the container",
            "a volume that is mounted into the container",
            "mount one at this path",
        )
    if kind in MEMORY:
        return info(id, f"{is_on}: it takes memory in addition to the pool, and is lost on reboot")
    if kind in SHARED or kind.startswith("fuse"):
        return info(id, f"{is_on}: where machines share it, flock must work across them")
    return ok(id, is_on)


def room_finding(config: FileConfig, label: str, free_bytes: int, held_bytes: int) -> Finding:
    """Compare the capacity of a tier with the free bytes and those that it holds already."""
    id, room_bytes, free = "tiers.room", free_bytes + held_bytes, format_bytes(free_bytes)
    if config.capacity_bytes is None:
        return info(id, f'no "capacity": {label} grows until the disk is full; {free} free')
    holds, capacity = format_bytes(held_bytes), format_bytes(config.capacity_bytes)
    found = f"{label}: {free} free, {holds} in use"
    if room_bytes < config.capacity_bytes:
        return warning(
            id,
            f'{found}; "capacity" is {capacity}',
            "room for all of it",
            f'write "capacity": "{room_bytes * 9 // 10 // MIB}MiB" or less, or free space',
        )
    return ok(id, f"{found}, of a capacity of {capacity}")
