"""The files of a model on this machine, and a digest of their content.

Everything below a model's folder counts, by name and whole content, unless it is proven not to
matter: `NOT_READ` and `NOT_ENTERED`. A file that may differ from what was loaded is a doubt.

Reading takes a second for 2 GB, so digests are kept between starts (kept_digests.py). The blob of a
file of the hub is named by its digest.

Source: git's racy-git.txt; huggingface_hub 2.4, file_download.py, `_create_symlink`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from safe_offload.started import process_started_ns
from safe_offload.tiers.namespace.kept_digests import Cancelled, KeptDigests, Stamp

NOT_READ: Final = {
    "README.md": "the page that the hub shows, changed more often than the model",
    "LICENSE": "for people",
    ".gitattributes": "tells git which files are large",
}
"""Files at the top of a model's folder that do not change what it computes, and why."""

NOT_ENTERED: Final = {
    ".git": "git's own copies of what lies beside it",
    ".cache": "when the hub's client downloaded what lies beside it",
    "..": "and all that begins so: versions of a Kubernetes volume, reached by links, which count",
}
"""Names below a model's folder that no loader opens, and why."""

NUM_FILES_MAX: Final = 5000
NUM_DOUBTS_MAX: Final = 4
CHUNK_BYTES: Final = 1 << 20
NICE: Final = 10
"""Of each reading thread (Linux): a tenth of the CPU that others get, so it still ends."""
RACY_NS: Final = 2_000_000_000
"""A file may change twice in one tick of its clock: no digest of a recent change is kept."""
TICK_NS: Final = 20_000_000
"""How far apart the stamps of a folder and of a file that was made in it may be."""
LINKED_WITHIN_NS: Final = 10_000_000_000
"""The hub's client makes the first link to a blob at once; one made later vouches for nothing."""


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where vLLM looks for a model.

    Attributes:
        name: a folder, a file, or a name on the hub, which may end in a file or in `:QUANT`.
        revision: on the hub; the commit if it is known.
        download_dir: the hub's cache; None for its default.
    """

    name: str
    revision: str | None = None
    download_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The digest of all names and contents of a model's files, empty without files.

    `doubts` are why the files may differ from what was loaded; `read_bytes` had to be read.
    """

    digest: str
    doubts: tuple[str, ...]
    num_files: int = 0
    size_bytes: int = 0
    read_bytes: int = 0


class _One(NamedTuple):
    digest: str = ""
    doubt: str = ""
    size_bytes: int = 0
    read_bytes: int = 0


@dataclass
class _Listing:
    """The files of a place by relative name."""

    since_ns: int
    files: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def add_folder(
        self, folder: str, prefix: str = "", above: tuple[tuple[int, int], ...] = ()
    ) -> None:
        at = os.stat(folder)
        above = (*above, (at.st_dev, at.st_ino))
        newest_ns = 0
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            newest_ns = max(newest_ns, entry.stat(follow_symlinks=False).st_ctime_ns)
            name = prefix + entry.name
            if name in NOT_READ or entry.name in NOT_ENTERED or entry.name.startswith(".."):
                continue
            if len(self.files) >= NUM_FILES_MAX or len(above) > 32:
                raise OverflowError(f"{folder!r} has too many files or folders for a model")
            if not os.path.isdir(entry.path):
                self.files[name] = entry.path
                continue
            below = entry.stat()
            if (below.st_dev, below.st_ino) not in above:  # else a link that leads in a circle
                self.add_folder(entry.path, f"{name}/", above)
        # What was made in it is as new as the folder. It can only have lost something, or be new.
        if at.st_ctime_ns > max(self.since_ns, newest_ns + TICK_NS):
            self.doubts.append(_changed(folder))


def _changed(path: str) -> str:
    return f"{path!r} changed after this process started, so it may not be what was loaded"


def find_files(place: ModelPlace, since_ns: int) -> tuple[str, dict[str, str], list[str]]:
    """Return the folder of a model, its files by relative name, and doubts about later changes.

    There are only doubts if the model is not on this machine.
    """
    listing = _Listing(since_ns)
    root = ""
    try:
        root = place.name if os.path.exists(place.name) else _snapshot(place, listing)
        if os.path.isdir(root):
            listing.add_folder(root)
        elif root:
            listing.files = {os.path.basename(path): path for path in _parts(root)}
        for part in (Path(os.path.abspath(root)), *Path(os.path.abspath(root)).parents):
            if part.is_symlink() and part.lstat().st_ctime_ns > since_ns:
                listing.doubts.append(_changed(str(part)))
    except (OSError, OverflowError, ValueError) as error:
        listing.files.clear()
        listing.doubts.append(f"the files of {place.name!r} cannot be listed: {error}")
    if not listing.files and not listing.doubts:
        listing.doubts.append(f"the weights of {place.name!r} are not files of this machine")
    return root, listing.files, listing.doubts


def _parts(path: str) -> list[str]:
    """Return a file, the others that it was split into, and a projector (GGUF)."""
    folder, name = os.path.split(path)
    stem = re.sub(r"-\d{5}-of-\d{5}", "", name)
    return [
        os.path.join(folder, other)
        for other in sorted(os.listdir(folder or "."))
        if other == name
        or re.sub(r"-\d{5}-of-\d{5}", "", other) == stem
        or (other.startswith("mmproj") and other.endswith(".gguf"))
    ]


def _snapshot(place: ModelPlace, listing: _Listing) -> str:
    """Return the folder of the hub's cache for a model; empty if there is none."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return ""
    name = "/".join(place.name.partition(":")[0].split("/")[:2])
    cache = Path(place.download_dir or constants.HF_HUB_CACHE).expanduser()
    repo = cache / repo_folder_name(repo_id=name, repo_type="model")
    revision = place.revision or constants.DEFAULT_REVISION
    ref = repo / "refs" / revision
    if ref.is_file():
        revision = ref.read_text().strip()
        is_only_one = len(os.listdir(repo / "snapshots")) == 1
        if ref.stat().st_ctime_ns > listing.since_ns and not is_only_one:
            listing.doubts.append(_changed(str(ref)))
    folder = repo / "snapshots" / revision
    return str(folder) if folder.is_dir() else ""


class FileDigests:
    """SHA-256 of whole files, read once and kept between starts (see `KeptDigests`).

    Each of `threads` reads a file. Changes after `since_ns`, by default the start of this process,
    are doubts.
    """

    def __init__(
        self,
        directory: str,
        *,
        threads: int = 4,
        since_ns: int | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._directory = directory
        self._threads = threads
        self._since_ns = process_started_ns() if since_ns is None else since_ns
        self._clock_ns = clock_ns

    def digest(self, place: ModelPlace, cancelled: Callable[[], bool]) -> Found | None:
        """Return the digest of the files of a model; None if cancelled. Never raises.

        Several threads call `cancelled` between chunks.
        """
        root, files, doubts = find_files(place, self._since_ns)
        if not files:
            return Found("", tuple(doubts))
        try:
            with KeptDigests(self._directory, os.path.abspath(root), cancelled) as kept:
                found = self._digest_all(files.values(), kept, cancelled)
        except Cancelled:
            return None
        except RuntimeError as error:  # no more threads
            return Found("", (f"the files of {place.name!r} cannot be read: {error}",))
        whole = hashlib.sha256()
        for name, one in zip(files, found, strict=True):
            encoded = os.fsencode(name)
            whole.update(b"%d %b %b\n" % (len(encoded), encoded, one.digest.encode()))
        doubts += [one.doubt for one in found if one.doubt]
        if (more := len(doubts) - NUM_DOUBTS_MAX) > 0:
            doubts[NUM_DOUBTS_MAX:] = [f"and {more} more"]
        size_bytes = sum(one.size_bytes for one in found)
        read_bytes = sum(one.read_bytes for one in found)
        return Found(whole.hexdigest(), tuple(doubts), len(files), size_bytes, read_bytes)

    def _digest_all(
        self, paths: Collection[str], kept: KeptDigests, cancelled: Callable[[], bool]
    ) -> list[_One]:
        def digest_one(path: str) -> _One:
            try:
                return self._digest_one(path, kept, cancelled)
            except OSError as error:
                return _One(doubt=f"{path!r} cannot be read: {error.strerror}")

        with ThreadPoolExecutor(self._threads, "digests", os.nice, (NICE,)) as pool:
            return list(pool.map(digest_one, paths))

    def _digest_one(self, path: str, kept: KeptDigests, cancelled: Callable[[], bool]) -> _One:
        link = os.lstat(path)
        file_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            looked_at_ns = self._clock_ns()
            now = os.fstat(file_fd)
            if not stat.S_ISREG(now.st_mode):
                return _One(doubt=f"{path!r} is not a regular file")
            blob = _untouched_blob(path, link, now)
            is_fresh = link.st_mtime_ns - now.st_ctime_ns < LINKED_WITHIN_NS
            if is_fresh and re.fullmatch("[0-9a-f]{64}", blob):
                return _One(blob, size_bytes=now.st_size)
            is_new = max(now.st_ctime_ns, link.st_ctime_ns) > self._since_ns
            doubt = _changed(path) if is_new and not blob else ""
            stamp = stamp_of(now)
            if digest := kept.get(path, stamp):
                return _One(digest, doubt, now.st_size)
            digest, read_bytes = _read(file_fd, cancelled)
            if stamp_of(os.fstat(file_fd)) != stamp or stamp_of(os.stat(path)) != stamp:
                doubt = f"{path!r} changed while it was read"
            elif now.st_ctime_ns <= looked_at_ns - RACY_NS:
                kept.put(path, stamp, digest)
            return _One(digest, doubt, now.st_size, read_bytes)
        finally:
            os.close(file_fd)


def stamp_of(now: os.stat_result) -> Stamp:
    """Return what identifies a version of a file: an editor can keep all of it but the last."""
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _untouched_blob(path: str, link: os.stat_result, now: os.stat_result) -> str:
    """Return the name of a blob of the hub that was not touched since it was linked, or "".

    The hub's client makes the link when the blob is complete.
    """
    if not stat.S_ISLNK(link.st_mode):
        return ""
    folder = os.path.realpath(os.path.dirname(path))
    blob = os.path.normpath(os.path.join(folder, os.readlink(path)))
    is_blob = os.path.dirname(blob) == os.path.join(folder.rpartition("/snapshots/")[0], "blobs")
    is_same = is_blob and os.path.samestat(os.lstat(blob), now)  # no link to somewhere else
    return os.path.basename(blob) if is_same and now.st_ctime_ns <= link.st_mtime_ns else ""


def _read(file_fd: int, cancelled: Callable[[], bool]) -> tuple[str, int]:
    with contextlib.suppress(OSError):  # pages that are mapped and dirty change without a stamp
        os.fdatasync(file_fd)
    with contextlib.suppress(OSError):  # NOREUSE (Linux 6.3): pages read once evict no others
        os.posix_fadvise(file_fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        os.posix_fadvise(file_fd, 0, 0, os.POSIX_FADV_NOREUSE)
    digest, buffer, read_bytes = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES)), 0
    while not cancelled():
        num_bytes = os.readv(file_fd, [buffer])
        if not num_bytes:
            return digest.hexdigest(), read_bytes
        digest.update(buffer[:num_bytes])
        read_bytes += num_bytes
    raise Cancelled
