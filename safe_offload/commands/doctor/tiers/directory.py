"""The directory of a file tier on trial: whether it can be used, what it lies on, how fast it is.

What is tried is tried in a folder of its own, in the directory or in the nearest one above it that
exists, and deleted again.

Source: proc_pid_mountinfo(5), flock(2), statvfs(3).
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safe_offload.commands.doctor.findings import Finding, error, info, ok, warning
from safe_offload.commands.doctor.tiers.rates import OBJECT_BYTES, TierTrial, rates_of
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import FileConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.files.capacity import USAGE_FILE, Usage
from safe_offload.tiers.files.directory import NotOursError, open_root
from safe_offload.tiers.files.file_store import open_ours
from safe_offload.tiers.files.object_file import takes_direct
from safe_offload.tiers.naming import NAMESPACE_BYTES, is_namespace_folder

NFS: Final = ("nfs", "nfs4", "cifs", "smb3")
SHARED: Final = ("lustre", "gpfs", "wekafs", "ceph", "beegfs")
MEMORY: Final = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryTrial(TierTrial):
    """What the trial of a directory found.

    Attributes:
        fix: of the problem, where there is a special one.
        uid: that owns what this process writes.
        others: users that own namespaces in it.
        held_bytes: what the tier holds already.
        lock_problem: what is wrong with `flock`; empty if nothing is.
    """

    with_rates = "a file system with a few MiB free"
    fix: str = ""
    exists: bool = True
    uid: int = 0
    others: tuple[int, ...] = ()
    file_system: str = ""
    free_bytes: int = 0
    held_bytes: int = 0
    lock_problem: str = ""


async def try_directory(config: FileConfig) -> DirectoryTrial:
    """Try the directory of a tier."""
    path = Path(config.location.path)
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    label = f"file://{path}"
    try:
        with suppress(FileNotFoundError):
            os.close(open_ours(str(path))[0])
        with tempfile.TemporaryDirectory(prefix="safe-offload-doctor-", dir=nearest) as name:
            folder_fd = open_root(name)
            try:
                uid = takes_direct(folder_fd, "direct")[1]
            finally:
                os.close(folder_fd)
            found = os.statvfs(name)
            tier_config = FileConfig(
                Location("file", f"{name}/tier"), num_threads=config.num_threads
            )
            tier, _ = open_tier(tier_config, OBJECT_BYTES, {})
            write_rate, read_rate = await rates_of(tier, bytes(NAMESPACE_BYTES))
            return DirectoryTrial(
                label=label,
                exists=nearest == path,
                uid=uid,
                others=_other_users(path, uid),
                file_system=file_system_of(nearest),
                free_bytes=found.f_bavail * found.f_frsize,
                held_bytes=_held_bytes(path),
                lock_problem=_lock_problem(f"{name}/lock"),
                write_bytes_per_s=write_rate,
                read_bytes_per_s=read_rate,
            )
    except NotOursError as refused:
        return DirectoryTrial(label=label, problem=refused.problem, fix=refused.fix)
    except OSError as problem:
        return DirectoryTrial(label=label, problem=f"{nearest}: {problem.strerror or problem}")


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


def _other_users(path: Path, uid: int) -> tuple[int, ...]:
    with suppress(FileNotFoundError):
        names = filter(is_namespace_folder, os.listdir(path))
        return tuple(sorted({os.lstat(path / name).st_uid for name in names} - {uid}))
    return ()


def _held_bytes(path: Path) -> int:
    with suppress(OSError):
        usage_fd = os.open(path / USAGE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            usage = Usage.read(usage_fd)
        finally:
            os.close(usage_fd)
        return 0 if usage is None else usage.taken_bytes
    return 0


def _lock_problem(path: str) -> str:
    """Return what is wrong with locks of files, which keep the capacity; empty if nothing is."""
    with open(path, "wb") as one, open(path, "wb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as problem:
            return f"flock fails: {problem.strerror}"
        return "flock grants one lock twice"


def check_directory(config: FileConfig, trial: DirectoryTrial) -> Iterator[Finding]:
    """Judge what was found."""
    id = "tiers.directory"
    if trial.problem:
        yield error(
            id,
            f"{trial.label} cannot be used by user {os.geteuid()}: {trial.problem}",
            "a directory that this user can create and write",
            trial.fix or "create it as vLLM's user with mode 0700, or mount the missing volume",
        )
        return
    if trial.others:
        users = ", ".join(map(str, trial.others))
        yield warning(
            id,
            f"{trial.label} contains files of user {users}; this process is user {trial.uid}",
            "one user for all engines that share a directory",
            "run them as one user, or give each user a directory",
        )
    else:
        can = "can be written" if trial.exists else "does not exist yet and can be created"
        yield ok(id, f"{trial.label} {can} by user {trial.uid}")
    yield _file_system(trial)
    yield _room(config, trial)
    id = "tiers.lock"
    if trial.lock_problem:
        yield warning(
            id,
            f"{trial.label}: {trial.lock_problem}, so `capacity` is not enforced",
            "a file system with flock",
            "mount it with locks, or use another one",
        )
    else:
        yield ok(id, f"flock works on {trial.label}, from this machine")


def _file_system(trial: DirectoryTrial) -> Finding:
    id, kind = "tiers.file-system", trial.file_system
    is_on = f"{trial.label} is on {kind or 'a file system of unknown type'}"
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


def _room(config: FileConfig, trial: DirectoryTrial) -> Finding:
    id, room_bytes = "tiers.room", trial.free_bytes + trial.held_bytes
    free = format_bytes(trial.free_bytes)
    if config.capacity_bytes is None:
        return info(id, f'no "capacity": {trial.label} grows until the disk is full; {free} free')
    holds = f"{trial.label}: {free} free, {format_bytes(trial.held_bytes)} in use"
    if room_bytes < config.capacity_bytes:
        return warning(
            id,
            f'{holds}; "capacity" is {format_bytes(config.capacity_bytes)}',
            "room for all of it",
            f'write "capacity": "{room_bytes * 9 // 10 // MIB}MiB" or less, or free space',
        )
    return ok(id, f"{holds}, of a capacity of {format_bytes(config.capacity_bytes)}")
