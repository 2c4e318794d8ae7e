"""Show, check and delete what a directory of a file tier holds; engines may use it meanwhile.

safe-offload cache ls /mnt/nvme/kv
safe-offload cache verify /mnt/nvme/kv
safe-offload cache prune /mnt/nvme/kv --to 200GiB --older-than 7d
safe-offload cache rm /mnt/nvme/kv --all
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import xxhash

from safe_offload.errors import SafeOffloadError
from safe_offload.settings import size
from safe_offload.units import MIB, TIB, format_bytes
from safe_offload.worker.tiers import directory, naming
from safe_offload.worker.tiers.capacity import USAGE_FILE, Kept, keep
from safe_offload.worker.tiers.naming import HEADER_BYTES, Header

_PIECE_BYTES: Final = 4 * MIB
_BAD_SHOWN_MAX: Final = 20
_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.1
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CacheError(SafeOffloadError):
    """The directory cannot be used as asked."""


# ---- arguments --------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the subcommands."""
    commands = parser.add_subparsers(required=True, metavar="ACTION")
    for name, function, what in (
        ("ls", _ls, "namespaces, their models, objects, bytes and age"),
        ("verify", _verify, "check every header and checksum"),
        ("prune", _prune, "delete what has not been used for longest, and what crashes left"),
        ("rm", _rm, "delete a namespace, or all"),
    ):
        command = commands.add_parser(name, help=what, description=f"{what}.".capitalize())
        command.add_argument("directory", metavar="DIR", help="of the tier")
        if name == "verify":
            command.add_argument("--delete", action="store_true", help="delete what is bad")
        elif name == "prune":
            command.add_argument("--to", metavar="SIZE", help='keep so much, such as "200GiB"')
            command.add_argument(
                "--older-than", metavar="AGE", help="delete what was not used since, such as 7d"
            )
        elif name == "rm":
            command.add_argument(
                "namespace", nargs="?", help="as `ls` shows it; its beginning is enough"
            )
            command.add_argument("--all", action="store_true", help="every namespace")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(action=function)


def run_command(arguments: Namespace) -> int:
    """Do what the arguments say, and return the exit status.

    Raises:
        CacheError: the directory cannot be used as asked.
        ConfigError: `--to` is no size.
    """
    path = arguments.directory.removeprefix("file://")
    try:
        root_fd = directory.open_root(path)
    except OSError as error:
        raise CacheError(
            f"{path} cannot be opened: {error.strerror}. Fix: give the directory of a tier, the "
            'path of its "url", as a user who may read it.'
        ) from error
    try:
        document, text, status = arguments.action(arguments, path, root_fd)
    except OSError as error:
        raise CacheError(
            f"{path}: {error.strerror or error}. Fix: run this as the user of the engines, on a "
            "file system that can be written."
        ) from error
    finally:
        os.close(root_fd)
    sys.stdout.write((json.dumps(document, indent=1) if arguments.json else text) + "\n")
    return int(status)


Answer = tuple[dict[str, Any], str, int]
"""What is printed as JSON, what is printed as text, and the exit status."""


def _age_s(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise CacheError(
            f"--older-than {text}: expected a number and s, m, h or d. Fix: write 7d for a week."
        )
    return float(found[1]) * _UNITS_S[found[2]]


# ---- ls ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Listed:
    """What is known of a namespace.

    Attributes:
        namespace: name of its folder.
        facts: what it is made of, as written beside its objects.
        after_reset: it was begun by an engine whose cache had been reset.
        num_objects: in it.
        size_bytes: of the objects.
        last_used_s: when one of them was last read or written, since 1970; 0 without any.
        first_used_s: when the one was used that was not used for longest.
        num_temporaries: objects that are being written, or were when their writer died.
    """

    namespace: str
    facts: dict[str, Any] = field(default_factory=dict)
    after_reset: bool = False
    num_objects: int = 0
    size_bytes: int = 0
    last_used_s: float = 0.0
    first_used_s: float = 0.0
    num_temporaries: int = 0

    @property
    def model(self) -> str:
        """Return the name of the model, if it is known."""
        return str(self.facts.get("model", "?"))

    def add(self, file: directory.Stored) -> None:
        """Count a file."""
        if file.is_temporary:
            self.num_temporaries += 1
            return
        used_s = file.used_at_ns / 1e9
        self.num_objects += 1
        self.size_bytes += file.size_bytes
        self.last_used_s = max(self.last_used_s, used_s)
        self.first_used_s = min(self.first_used_s or used_s, used_s)


def _listed(root_fd: int) -> list[Listed]:
    found: dict[str, Listed] = {}
    for name in _namespaces(root_fd):
        described = _description(name, root_fd)
        found[name] = Listed(name, naming.facts_of(described), naming.is_after_reset(described))
    for file, _ in directory.walk(root_fd):
        if file.namespace in found:
            found[file.namespace].add(file)
    return sorted(found.values(), key=lambda listed: -listed.last_used_s)


def _namespaces(root_fd: int) -> list[str]:
    return sorted(name for name in os.listdir(root_fd) if naming.is_namespace_folder(name))


def _description(namespace: str, root_fd: int) -> bytes:
    try:
        folder_fd = directory.open_folder(namespace, root_fd)
    except OSError:
        return b""
    try:
        file_fd = os.open(naming.DESCRIPTION_FILE, _READ_FLAGS, dir_fd=folder_fd)
    except OSError:
        return b""
    finally:
        os.close(folder_fd)
    try:
        return os.read(file_fd, MIB)
    finally:
        os.close(file_fd)


def _ls(arguments: Namespace, path: str, root_fd: int) -> Answer:
    now_s = time.time()
    listed = _listed(root_fd)
    total_bytes = sum(each.size_bytes for each in listed)
    document = {
        "directory": path,
        "size_bytes": total_bytes,
        "namespaces": [asdict(each) for each in listed],
    }
    rows: list[tuple[str, ...]] = [("NAMESPACE", "OBJECTS", "SIZE", "LAST USED", "OLDEST", "MODEL")]
    for each in listed:
        model = each.model + (" (after a reset)" if each.after_reset else "")
        ages = [_ago(now_s, at_s) for at_s in (each.last_used_s, each.first_used_s)]
        sizes = f"{each.num_objects:,}", format_bytes(each.size_bytes)
        rows.append((each.namespace, *sizes, ages[0], ages[1], model))
    count = f"{len(listed)} namespace{'s' if len(listed) != 1 else ''}"
    num_objects = sum(each.num_objects for each in listed)
    total = f"{count}, {num_objects:,} objects, {format_bytes(total_bytes)} in {path}"
    if not listed:
        return document, f"No engine has stored anything in {path}.", 0
    return document, "\n".join([*_table(rows), total]), 0


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _ago(now_s: float, at_s: float) -> str:
    if not at_s:
        return "-"
    age_s = max(now_s - at_s, 0.0)
    for unit in ("d", "h", "m"):
        if age_s >= _UNITS_S[unit]:
            return f"{age_s / _UNITS_S[unit]:.0f}{unit}"
    return f"{age_s:.0f}s"


# ---- verify -----------------------------------------------------------------------------------


def _verify(arguments: Namespace, path: str, root_fd: int) -> Answer:
    num_objects, size_bytes, bad = 0, 0, []
    for file, folder_fd in directory.walk(root_fd):
        if file.is_temporary:
            continue
        try:
            problem = problem_of(file, folder_fd)
        except FileNotFoundError:
            continue  # evicted meanwhile
        num_objects += 1
        size_bytes += file.size_bytes
        if problem:
            bad.append({"file": f"{file.namespace}/{file.folder}/{file.file}", "problem": problem})
            if arguments.delete:
                directory.remove(file.file, folder_fd)
    is_well = not bad or arguments.delete
    document = {
        "directory": path,
        "num_objects": num_objects,
        "size_bytes": size_bytes,
        "bad": bad,
        "deleted": bool(bad) and arguments.delete,
    }
    lines = [f"{each['file']}: {each['problem']}" for each in bad[:_BAD_SHOWN_MAX]]
    if len(bad) > _BAD_SHOWN_MAX:
        lines.append(f"… and {len(bad) - _BAD_SHOWN_MAX} more; --json prints all")
    lines.append(f"{num_objects:,} objects, {format_bytes(size_bytes)} checked: {len(bad)} bad.")
    if bad:
        lines[-1] += (
            " They were deleted."
            if arguments.delete
            else " No engine ever uses them. Fix: run this again with --delete."
        )
    return document, "\n".join(lines), 0 if is_well else 1


def problem_of(file: directory.Stored, folder_fd: int) -> str:
    """Return what is wrong with an object; empty if nothing is.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    try:
        file_fd = os.open(file.file, _READ_FLAGS, dir_fd=folder_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    try:
        found = Header.read(os.read(file_fd, HEADER_BYTES))
        if found is None:
            return "it has no header of this version"
        name = naming.name_of(file.namespace, file.file)
        if name != found.name or naming.path_of(found.name)[0] != file.folder:
            return "its header names another object"
        length_bytes, digest = _read_body(file_fd)
        if length_bytes != found.length_bytes:
            return f"it has {length_bytes} bytes, its header says {found.length_bytes}"
        return "" if digest == found.digest else "its checksum is wrong"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    finally:
        os.close(file_fd)


def _read_body(file_fd: int) -> tuple[int, int]:
    state, length_bytes = xxhash.xxh3_64(), 0
    while piece := os.read(file_fd, _PIECE_BYTES):
        state.update(piece)
        length_bytes += len(piece)
    with contextlib.suppress(OSError):  # what is only checked need not stay in memory
        os.posix_fadvise(file_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return length_bytes, state.intdigest()


# ---- prune and rm -----------------------------------------------------------------------------


def _prune(arguments: Namespace, path: str, root_fd: int) -> Answer:
    if arguments.to is None and arguments.older_than is None:
        raise CacheError("prune: nothing to go by. Fix: add --to 200GiB or --older-than 7d.")
    _require_cache(path, root_fd)
    to_bytes = None if arguments.to is None else size(1024 * TIB).read("--to", arguments.to)
    before_ns = 0
    if arguments.older_than is not None:
        before_ns = time.time_ns() - int(_age_s(arguments.older_than) * 1e9)
    kept = _kept(path, root_fd, to_bytes, before_ns)
    text = (
        f"Deleted {kept.num_evicted:,} objects, {format_bytes(kept.evicted_bytes)}, and "
        f"{kept.num_orphans} orphaned temporary files. {format_bytes(kept.held_bytes)} are left."
    )
    return {"directory": path, **asdict(kept)}, text, 0


def _kept(path: str, root_fd: int, to_bytes: int | None = None, before_ns: int = 0) -> Kept:
    """Count and evict, after an engine that is at it has ended."""
    give_up_at_s = time.monotonic() + _PATIENCE_S
    while True:
        kept = keep(root_fd, None, to_bytes=to_bytes, used_before_ns=before_ns)
        if kept is not None:
            return kept
        if time.monotonic() > give_up_at_s:
            raise CacheError(f"{path}: an engine is evicting. Fix: try again in a minute.")
        time.sleep(_PAUSE_S)


def _rm(arguments: Namespace, path: str, root_fd: int) -> Answer:
    if (arguments.namespace is None) == (not arguments.all):
        raise CacheError("rm: name what goes. Fix: add a namespace, as `ls` shows it, or --all.")
    _require_cache(path, root_fd)
    chosen = _namespaces(root_fd)
    if not arguments.all:
        chosen = [name for name in chosen if name.startswith(arguments.namespace)]
        if len(chosen) != 1 or not arguments.namespace:
            found = "none begins" if not chosen else f"{len(chosen)} begin"
            raise CacheError(
                f"rm: of the namespaces in {path} {found} with {arguments.namespace!r}. Fix: run "
                f"`safe-offload cache ls {path}` and write one of them."
            )
    num_objects, size_bytes = 0, 0
    for namespace in chosen:
        for file, folder_fd in directory.walk(root_fd, namespace):
            if directory.remove(file.file, folder_fd) and not file.is_temporary:
                num_objects += 1
                size_bytes += file.size_bytes
        _remove_folders(namespace, root_fd)
    _kept(path, root_fd)  # so that engines know how much is there now
    document = {
        "directory": path,
        "namespaces": chosen,
        "num_objects": num_objects,
        "size_bytes": size_bytes,
    }
    names = ", ".join(chosen) or "nothing"
    return document, f"Deleted {names}: {num_objects:,} objects, {format_bytes(size_bytes)}.", 0


def _remove_folders(namespace: str, root_fd: int) -> None:
    """Remove the empty folders of a namespace; an engine may be writing to it again."""
    try:
        namespace_fd = directory.open_folder(namespace, root_fd)
    except FileNotFoundError:
        return
    try:
        for folder in os.listdir(namespace_fd):
            if naming.is_object_folder(folder):
                _remove_folder(folder, namespace_fd)
        if os.listdir(namespace_fd) == [naming.DESCRIPTION_FILE]:
            directory.remove(naming.DESCRIPTION_FILE, namespace_fd)
    finally:
        os.close(namespace_fd)
    _remove_folder(namespace, root_fd)


def _remove_folder(name: str, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def _require_cache(path: str, root_fd: int) -> None:
    """Refuse a directory that no tier has used: nothing is deleted or made there."""
    if not _namespaces(root_fd) and not os.access(USAGE_FILE, os.F_OK, dir_fd=root_fd):
        raise CacheError(f"{path} holds no cache of a tier. Fix: give the directory of a tier.")
