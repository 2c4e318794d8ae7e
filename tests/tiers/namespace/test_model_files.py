"""What the files of a model contain: any change is another digest, and nothing is read twice."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import mmap
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest

from safe_offload.started import process_started_ns
from safe_offload.tiers.namespace import kept_digests, model_files
from safe_offload.tiers.namespace.model_files import (
    NOT_ENTERED,
    NOT_READ,
    FileDigests,
    Found,
    ModelPlace,
)
from tests.fresh_process import start
from tests.stopping import stop

LATER_NS = 10_000_000_000
"""What is only just written is not kept: an hour does not pass in a test, so clocks are ahead."""


def later_ns() -> int:
    return time.time_ns() + LATER_NS


def digests(kept: Path | str, **options: Any) -> FileDigests:
    """Digests of a process that starts later than anything that a test writes."""
    options = {"clock_ns": later_ns, "since_ns": later_ns(), "threads": 2, **options}
    return FileDigests(str(kept), **options)


def digest(kept: Path | str, model: Path | str, **options: Any) -> Found:
    found = digests(kept, **options).digest(ModelPlace(str(model)), lambda: False)
    assert found is not None
    return found


def write(model: Path, **files: bytes) -> Path:
    model.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (model / name.replace("__", ".")).write_bytes(content)
    return model


@pytest.fixture
def model(tmp_path):
    return write(
        tmp_path / "model",
        config__json=b"{}",
        preprocessor_config__json=b"{}",
        modeling__py=b"pass",
        model__safetensors=random.Random(1).randbytes(3 << 20),
    )


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


def edit(path: Path, at: int, content: bytes) -> None:
    """Change a file in place as an editor would that keeps its size and time."""
    before = path.stat()
    file_fd = os.open(path, os.O_WRONLY)
    os.pwrite(file_fd, content, at)
    os.close(file_fd)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


# ---- what counts -------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path):
    """A folder in memory: what is dirty on a disk is written before it is read."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_each_of_two_hundred_edits_of_weights_is_another_digest(memory, kept, monkeypatch):
    """One byte each, size and time kept: what was kept of the file before is not taken for it."""
    monkeypatch.setattr(model_files, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(os, "nice", lambda _: None)  # the machine may be busy
    seeded, models = random.Random(27), [memory / f"{number}" for number in range(20)]
    names = [f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)]
    for model in models:  # in each of them 10 edits: they wait for a tick together
        write(model, **{name: seeded.randbytes(13_000) for name in names})
    seen = [digest(kept, model).digest for model in models]
    for _ in range(10):
        wait_for_a_tick()
        edited = [model / seeded.choice(names) for model in models]
        for path in edited:
            at = seeded.randrange(path.stat().st_size)
            edit(path, at, bytes([path.read_bytes()[at] ^ seeded.randrange(1, 256)]))
        for model, path in zip(models, edited, strict=True):
            found = digest(kept, model)
            assert found.read_bytes == path.stat().st_size  # the others' digests are the kept ones
            seen.append(found.digest)
    assert len(set(seen)) == len(seen) == 20 + 200


def wait_for_a_tick(ahead_ns: int = 0) -> None:
    """Wait until the clock that files are stamped with goes on (CLOCK_REALTIME_COARSE)."""
    before_ns = time.time_ns() + ahead_ns
    while time.clock_gettime_ns(5) <= before_ns:
        time.sleep(0.0002)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json"),
        *("chat_template.jinja", "modeling_x.py", "model.safetensors.index.json", "merges.txt"),
        *("a.safetensors", "a.bin", "a.pt", "a.pth", "a.gguf", "a.npz", "a.tensors", "a.unknown"),
        *("no_suffix", "original/consolidated.00.pth", "1_Pooling/config.json", "x/README.md"),
        *(".hidden", ".locks/x", "a/b/c/d/e", "picture.png", os.fsdecode(b"\xff\x1b[2J")),
    ],
)
def test_every_file_counts_by_name_and_content(tmp_path, kept, name):
    model = write(tmp_path / "model", base=b"")
    without = digest(kept, model).digest
    path = model / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"one")
    one = digest(kept, model).digest
    wait_for_a_tick()
    path.write_bytes(b"two")
    two = digest(kept, model).digest
    path.rename(path.with_name("other"))
    other_name = digest(kept, model).digest
    assert len({without, one, two, other_name}) == 4
    (path.parent / "other").unlink()
    assert digest(kept, model).digest == without


@pytest.mark.parametrize(
    "name", [*NOT_READ, *(f"{name}/x" for name in NOT_ENTERED if name[1:2] != ".")]
)
def test_what_is_proven_not_to_matter_does_not_count(model, kept, name):
    before = digest(kept, model)
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"changed")
    after = digest(kept, model)
    assert (after.digest, after.num_files) == (before.digest, before.num_files)
    assert len(NOT_READ) + len(NOT_ENTERED) <= 6
    assert all({**NOT_READ, **NOT_ENTERED}.values())


def test_a_mounted_volume_of_kubernetes_counts_by_its_links(tmp_path, kept):
    """Its files are links by way of `..data` to a folder named after the time."""
    found = []
    for at in ("..2026_11_23", "..2027_01_01"):
        model = tmp_path / f"model{at}"
        write(model / at, config__json=b"{}")
        (model / "..data").symlink_to(at)
        (model / "config.json").symlink_to("..data/config.json")
        found.append(digest(kept, model))
    assert found[0].digest == found[1].digest
    assert (found[0].num_files, found[0].doubts) == (1, ())


def test_contents_that_two_files_swap_count(tmp_path, kept):
    one = digest(kept, write(tmp_path / "1", a=b"x", b=b"y", ab=b""))
    two = digest(kept, write(tmp_path / "2", a=b"y", b=b"x", ab=b""))
    assert one.digest != two.digest


def test_a_gguf_is_its_file_and_its_parts(tmp_path, kept):
    names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-a.gguf", "b.gguf"]
    model = tmp_path / "models"
    model.mkdir()
    for name in names:
        (model / name).write_bytes(name.encode())
    found = [digest(kept, model / names[0])]
    for name in names:
        (model / name).write_bytes(b"changed")
        found.append(digest(kept, model / names[0]))
    assert [one.num_files for one in found] == [3] * 5
    assert len({one.digest for one in found}) == 4
    assert found[-1].digest == found[-2].digest  # another model


# ---- the hub's cache ---------------------------------------------------------------------------


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub:
    """A cache as huggingface_hub makes it: blob, then link."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.repo = cache / "models--org--tiny"
        self.commit = "c" * 40
        self.refs = self.repo / "refs"
        self.refs.mkdir(parents=True)
        (self.refs / "main").write_text(self.commit)

    def add(self, name: str, content: bytes, blob: str = "", commit: str = "") -> Path:
        path = self.repo / "blobs" / (blob or sha256(content))
        path.parent.mkdir(parents=True, exist_ok=True)
        incomplete = path.with_name(f"{path.name}.incomplete")
        incomplete.write_bytes(content)
        incomplete.chmod(0o644)
        incomplete.rename(path)
        link = self.repo / "snapshots" / (commit or self.commit) / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(path, link.parent))
        return link

    def place(self, **values: Any) -> ModelPlace:
        return ModelPlace(**{"name": "org/tiny", "download_dir": str(self.cache), **values})

    def digest(self, kept: Path, since_ns: int | None = None, **place: Any) -> Found:
        since_ns = later_ns() if since_ns is None else since_ns
        found = digests(kept, since_ns=since_ns).digest(self.place(**place), lambda: False)
        assert found is not None
        return found


WEIGHTS = random.Random(2).randbytes(100_000)


@pytest.fixture
def hub(tmp_path):
    hub = Hub(tmp_path / "hub")
    hub.add("config.json", b"{}", blob="f" * 40)
    hub.add("model.safetensors", WEIGHTS)
    hub.add("original/consolidated.00.pth", WEIGHTS[:50])
    return hub


def test_hub_files_are_digested_by_the_name_of_their_blob(hub, kept, tmp_path):
    found = hub.digest(kept, since_ns=0)  # to be downloaded while a process starts is no doubt
    assert (found.num_files, found.read_bytes, found.doubts) == (3, len(b"{}"), ())
    assert found.size_bytes == len(WEIGHTS) + 52
    plain = tmp_path / "plain"
    write(plain, config__json=b"{}", model__safetensors=WEIGHTS)
    write(plain / "original", **{"consolidated.00.pth": WEIGHTS[:50]})
    assert digest(kept, plain).digest == found.digest


def test_the_snapshot_is_the_revision_and_may_be_named_by_its_folder(hub, kept):
    main = hub.digest(kept)
    other = "d" * 40
    hub.add("config.json", b"{ }", blob="e" * 40, commit=other)
    assert hub.digest(kept, revision=hub.commit).digest == main.digest
    assert hub.digest(kept, revision=other).num_files == 1
    assert hub.digest(kept, name="org/tiny:Q4_K_M").digest == main.digest
    assert hub.digest(kept, name="org/tiny/model-Q4.gguf").digest == main.digest
    snapshot = hub.repo / "snapshots" / hub.commit
    found = digest(kept, snapshot)
    assert found.digest == main.digest
    link = hub.cache.parent / "model"
    link.symlink_to(snapshot)
    (kept / "none").mkdir()
    assert digest(kept / "other", link).read_bytes == len(b"{}")


@pytest.mark.parametrize("touch", ["edit", "chmod", "copy", "link", "rename"])
def test_a_blob_that_was_touched_is_read(hub, kept, touch):
    before = hub.digest(kept)
    link = hub.repo / "snapshots" / hub.commit / "model.safetensors"
    blob = Path(os.path.realpath(link))
    wait_for_a_tick()
    content = WEIGHTS
    if touch == "edit":
        edit(blob, 50_000, b"?")
        content = WEIGHTS[:50_000] + b"?" + WEIGHTS[50_001:]
    elif touch == "chmod":
        blob.chmod(0o600)
    elif touch == "copy":
        copied = blob.read_bytes()
        blob.unlink()
        blob.write_bytes(copied)
    elif touch == "link":  # to a file that is older than the link
        content = b"older"
        old = hub.repo / "blobs" / sha256(b"older")
        old.write_bytes(content)
        link.unlink()
        link.symlink_to(os.path.relpath(blob, link.parent))
        blob.unlink()
        blob.symlink_to(old)
    else:
        content = b"other"
        (hub.repo / "blobs" / "other").write_bytes(content)
        wait_for_a_tick()
        (hub.repo / "blobs" / "other").rename(blob)
    after = hub.digest(kept)
    assert (after.digest == before.digest) == (content == WEIGHTS)
    assert after.read_bytes == len(content)  # config.json was kept


def test_a_blob_that_was_edited_and_then_got_another_link_is_read(hub, kept, monkeypatch):
    """A new revision with the same file is linked to the blob that is there, unseen."""
    before = hub.digest(kept)
    (hub.repo / "snapshots" / hub.commit).rename(hub.cache.parent / "removed")
    blob = hub.repo / "blobs" / sha256(WEIGHTS)
    wait_for_a_tick()
    edit(blob, 0, b"?")
    monkeypatch.setattr(model_files, "LINKED_WITHIN_NS", model_files.TICK_NS)
    wait_for_a_tick(2 * model_files.TICK_NS)
    link = hub.repo / "snapshots" / hub.commit / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(os.path.relpath(blob, link.parent))
    after = hub.digest(kept)
    assert after.read_bytes == len(WEIGHTS)
    assert after.digest != before.digest
    assert hub.digest(kept, since_ns=time.time_ns() - LATER_NS).doubts == ()


def test_a_link_that_leaves_the_blobs_is_a_file_like_any_other(hub, kept, tmp_path):
    outside = tmp_path / sha256(WEIGHTS)
    outside.write_bytes(b"lies")
    before = hub.digest(kept)
    link = hub.repo / "snapshots" / hub.commit / "model.safetensors"
    link.unlink()
    link.symlink_to(outside)
    after = hub.digest(kept)
    assert after.digest != before.digest
    assert after.read_bytes == 4


class _TinyHub(http.server.BaseHTTPRequestHandler):
    """Answers as huggingface.co does for one repository."""

    files: ClassVar = {"config.json": b"{}", "model.safetensors": WEIGHTS}

    def do_HEAD(self) -> None:
        content = self.files[self.path.rpartition("/")[2]]
        is_large = len(content) > 100
        self.send_response(200)
        self.send_header("ETag", f'"{sha256(content) if is_large else "f" * 40}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", f"{len(content)}")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.files[self.path.rpartition("/")[2]])

    def log_message(self, *_: object) -> None:
        pass


def test_what_huggingface_hub_downloads_is_as_we_take_it_to_be(tmp_path, kept, monkeypatch):
    """Its own client, and a server of two files."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub = Hub(tmp_path / "hub")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _TinyHub) as server:
        threading.Thread(target=server.serve_forever).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for name in _TinyHub.files:
            huggingface_hub.hf_hub_download(
                "org/tiny", name, cache_dir=hub.cache, endpoint=endpoint, token=False
            )
        server.shutdown()
    found = hub.digest(kept, since_ns=0)
    assert (found.num_files, found.read_bytes, found.doubts) == (2, len(b"{}"), ())
    edit(hub.repo / "blobs" / sha256(WEIGHTS), 0, b"?")
    assert hub.digest(kept).digest != found.digest


def test_a_blob_that_was_touched_since_this_process_started_is_a_doubt(hub, kept):
    since_ns = time.time_ns()
    blob = hub.repo / "blobs" / ("f" * 40)
    wait_for_a_tick()
    edit(blob, 0, b"[]")
    (doubt,) = hub.digest(kept, since_ns=since_ns - LATER_NS).doubts
    assert "config.json' changed after this process started" in doubt


def test_a_branch_that_moved_since_this_process_started_is_a_doubt(hub, kept):
    other = "d" * 40
    hub.add("config.json", b"{ }", blob="e" * 40, commit=other)
    (hub.refs / "main").write_text(other)
    (doubt,) = hub.digest(kept, since_ns=0).doubts
    assert "refs/main' changed after" in doubt
    assert hub.digest(kept, since_ns=0, revision=other).doubts == ()
    assert hub.digest(kept).doubts == ()


# ---- digests that are kept ---------------------------------------------------------------------


def size_of(model: Path) -> int:
    return sum(path.stat().st_size for path in model.rglob("*") if path.is_file())


def test_the_next_start_reads_nothing(model, kept):
    first, second = digest(kept, model), digest(kept, model)
    assert first.read_bytes == first.size_bytes == size_of(model)
    assert (second.read_bytes, second.size_bytes) == (0, first.size_bytes)
    assert second.digest == first.digest
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [b"{}", b"[]"])
def test_another_file_with_the_same_times_is_read(model, kept, tmp_path, content):
    """A file of the same size and time that is put in its place has another inode."""
    before = digest(kept, model)
    path, other = model / "config.json", tmp_path / "other"
    other.write_bytes(content)
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    other.rename(path)
    after = digest(kept, model)
    assert (after.digest == before.digest) == (content == b"{}")
    assert after.read_bytes == 2


def test_what_has_just_changed_is_not_kept(model, kept):
    """It could change again in the same tick of the file system's clock, or of a coarser one."""
    now_ns = min(path.stat().st_ctime_ns for path in model.iterdir())
    first = digest(kept, model, clock_ns=lambda: now_ns + model_files.RACY_NS - 1)
    second = digest(kept, model)
    assert second.read_bytes == first.size_bytes
    assert digest(kept, model).read_bytes == 0


def test_a_file_may_say_that_it_is_of_the_future(model, kept):
    """Archives carry the time of another clock. When a file was changed, ctime tells."""
    before = digest(kept, model)
    os.utime(model / "config.json", (2**32, 2**32))
    found = [digest(kept, model) for _ in "ab"]
    assert [one.read_bytes for one in found] == [2, 0]
    assert found[0] == dataclasses.replace(before, read_bytes=2)


def test_a_mapping_that_stays_open_changes_a_file_in_the_open(model, kept):
    """A page that is dirty already changes without another time: it is written out before."""
    path = model / "model.safetensors"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        seen = set()
        for count in range(1, 4):
            mapped[4096] = count
            seen.add(digest(kept, model).digest)
            wait_for_a_tick()
        if os.stat(path).st_dev == os.stat("/dev/shm").st_dev:
            pytest.skip("tmpfs has no times for mappings")
        assert len(seen) == 3


def test_nothing_else_is_made_in_the_directory(model, kept):
    for _ in range(3):
        edit(model / "config.json", 0, os.urandom(1))
        digest(kept, model)
    assert sorted(path.suffix for path in kept.iterdir()) == [".json", ".lock"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()} == {0o600}


def test_what_is_kept_is_bounded(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(kept_digests, "NUM_FILES_MAX", 6)
    models = [write(tmp_path / f"{number}", a=b"x") for number in range(10)]
    for model in models:
        digest(kept, model)
        assert digest(kept, models[0]).read_bytes == 0  # in use, so not removed
    assert len(list(kept.iterdir())) <= 8
    assert digest(kept, models[0]).read_bytes == 0
    assert digest(kept, models[1]).read_bytes == 1


# ---- a directory that is not ours --------------------------------------------------------------


def one_json(kept: Path) -> Path:
    (path,) = kept.glob("*.json")
    return path


def poison(path: Path) -> None:
    """Let the digests that were kept say something else."""
    files = json.loads(path.read_text())
    path.write_text(json.dumps({name: [*kept[:-1], "0" * 64] for name, kept in files.items()}))


def test_what_was_kept_is_believed(model, kept):
    """The tests below show that it is not, so it must be where all is well."""
    before = digest(kept, model)
    poison(one_json(kept))
    assert digest(kept, model).digest != before.digest


def swap_for_link(path: Path, theirs: Path) -> None:
    path.rename(theirs)
    path.symlink_to(theirs)


def give_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


def swap_for_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILED: dict[str, Callable[[Path, Path, Path], None]] = {
    "others may write the folder": lambda kept, file, theirs: kept.chmod(0o770),
    "others may write the file": lambda kept, file, theirs: file.chmod(0o666),
    "the folder is a link": lambda kept, file, theirs: swap_for_link(kept, theirs),
    "the file is a link": lambda kept, file, theirs: swap_for_link(file, theirs),
    "the file has two names": lambda kept, file, theirs: theirs.hardlink_to(file),
    "the folder is another user's": lambda kept, file, theirs: give_away(kept),
    "the file is another user's": lambda kept, file, theirs: give_away(file),
    "the file is a fifo": lambda kept, file, theirs: swap_for_fifo(file),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_others_may_have_written_is_not_believed(model, kept, spoil):
    before = digest(kept, model)
    poison(one_json(kept))
    spoil(kept, one_json(kept), kept.with_name("theirs"))
    after = digest(kept, model)
    assert (after.digest, after.read_bytes) == (before.digest, before.size_bytes)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"x": {}}'),
        *(b"STAMP", b"STAMP 1", b"STAMP short", b"STAMP deep"),
    ],
)
def test_garbage_is_read_over(model, kept, content):
    before = digest(kept, model)
    path = one_json(kept)
    if content.startswith(b"STAMP"):
        wrong = {b"1": [1], b"short": ["abc"], b"deep": [{}]}.get(content[6:], [])
        files = json.loads(path.read_text())
        content = json.dumps({name: kept[:-1] + wrong for name, kept in files.items()}).encode()
    path.write_bytes(content)
    after = digest(kept, model)
    assert (after.digest, after.read_bytes) == (before.digest, before.size_bytes)
    assert digest(kept, model).read_bytes == 0


@pytest.mark.parametrize("where", ["/proc/none/kept", "/dev/null/kept", "/dev/null", "bad\0name"])
def test_without_a_directory_nothing_is_kept(model, where):
    found = [digest(where, model) for _ in "ab"]
    assert found[0] == found[1]
    assert found[0].read_bytes == size_of(model)


# ---- several ranks -----------------------------------------------------------------------------


def _rank(kept: Path, model: Path, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(digest(kept, model))


@contextlib.contextmanager
def started(function: Callable[..., object], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Start a process of a function that gets a pipe, too; yield the process and our end of it."""
    pipe, of_process = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder, pipe:
        how = {"log": Path(folder, "log"), "environment": os.environ}
        process = start(function, *arguments, of_process, **how)
        of_process.close()
        try:
            yield process, pipe
        finally:
            process.kill()
            process.join()


def test_ranks_that_ask_at_the_same_time_read_once(tmp_path, kept):
    model = write(tmp_path / "model", a__bin=os.urandom(10 << 20), b__bin=os.urandom(1000))
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(started(_rank, kept, model))[1] for _ in range(4)]
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 4
        for pipe in pipes:
            pipe.send("go")
        found = [pipe.recv() for pipe in pipes]
    assert len({one.digest for one in found}) == 1
    assert sum(one.read_bytes for one in found) == size_of(model)


def _hold(kept: Path, model: Path, pipe: Connection) -> None:
    """Read until killed."""

    def cancelled() -> bool:
        pipe.send("is reading")
        time.sleep(1000)
        return False

    digests(kept).digest(ModelPlace(str(model)), cancelled)


@contextlib.contextmanager
def holding(kept: Path, model: Path) -> Iterator[Any]:
    with started(_hold, kept, model) as (holder, pipe):
        assert pipe.recv() == "is reading"
        yield holder


def test_a_rank_that_dies_while_it_reads_holds_up_nobody(model, kept, monkeypatch, package_log):
    monkeypatch.setattr(kept_digests, "LOG_AFTER_S", -1.0)
    asked = threading.Event()
    place = ModelPlace(str(model))
    with holding(kept, model) as holder, ThreadPoolExecutor() as pool:
        reading = pool.submit(digests(kept).digest, place, asked.set)
        assert asked.wait(250)  # it waits
        assert not reading.done()
        assert "hashing the model's files" in package_log[-1].getMessage()
        os.kill(holder.pid, signal.SIGKILL)
        assert reading.result(250).read_bytes == size_of(model)


def test_waiting_for_another_rank_can_be_cancelled(model, kept):
    with holding(kept, model):
        assert digests(kept).digest(ModelPlace(str(model)), lambda: True) is None


def test_a_rank_that_is_stopped_does_not_hold_up_others_for_ever(model, kept, monkeypatch):
    monkeypatch.setattr(kept_digests, "_PATIENCE_S", 0.0)
    with holding(kept, model) as holder:
        stop(holder.pid)
        assert digest(kept, model).read_bytes == size_of(model)


def test_another_model_is_not_waited_for(model, kept, tmp_path):
    other = write(tmp_path / "other", a=b"x")
    with holding(kept, model):
        assert digest(kept, other).read_bytes == 1


def test_cancelling_ends_between_chunks(model, kept):
    asked = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 5

    found = digests(kept, threads=1).digest(ModelPlace(str(model)), cancelled)
    assert found is None
    assert len(asked) <= 5 + len(list(model.iterdir()))  # not once for each chunk
    assert digest(kept, model).read_bytes == size_of(model) - len(b"{}")  # config.json was kept


def test_threads_that_read_step_back(model, kept):
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    nice = set()

    def cancelled() -> bool:
        nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return False

    assert digests(kept).digest(ModelPlace(str(model)), cancelled) is not None
    assert nice == {min(19, ours + model_files.NICE)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours


# ---- doubts ------------------------------------------------------------------------------------


def doubts_of(model: Path | str, kept: Path, since_ns: int | None = None) -> tuple[str, ...]:
    return digest(kept, model, since_ns=later_ns() if since_ns is None else since_ns).doubts


@pytest.mark.parametrize(
    "name", ["s3://bucket/model", "org/none", "/no/such", "bad\0name", "", "a" * 999]
)
def test_what_is_not_here_is_a_doubt(kept, tmp_path, name):
    place = ModelPlace(name, download_dir=str(tmp_path))
    found = digests(kept).digest(place, lambda: False)
    assert found is not None
    assert (found.digest, found.num_files) == ("", 0)
    (doubt,) = found.doubts
    assert "are not files of this machine" in doubt or "cannot be listed" in doubt


def test_a_model_of_modelscope_is_not_looked_for_on_the_hub(hub, kept, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert hub.digest(kept).doubts == ("the weights of 'org/tiny' are not files of this machine",)


def test_each_change_after_the_start_is_a_doubt(model, kept, tmp_path):
    """Also what leaves all files as old as they were: one is removed, or all are exchanged."""
    (model / "below").mkdir()
    (model / "below" / "x").write_bytes(b"x")
    (model / "link").symlink_to("below/x")
    other = write(tmp_path / "other", config__json=b"{}")
    current = tmp_path / "current"
    current.symlink_to(model)
    for number, change in enumerate(
        (
            lambda: edit(model / "config.json", 0, b"[]"),
            lambda: (model / "new").write_bytes(b""),
            (model / "link").unlink,
            lambda: (model / "link").symlink_to("config.json"),
            (model / "below" / "x").unlink,
            (model / "below").rmdir,
            lambda: (current.unlink(), current.symlink_to(other)),
            lambda: (other.rename(tmp_path / "old"), model.rename(other)),
        )
    ):
        wait_for_a_tick(2 * model_files.TICK_NS)
        since_ns = time.time_ns()
        assert doubts_of(current, kept, since_ns) == (), number
        wait_for_a_tick()
        change()
        assert doubts_of(current, kept, since_ns) != (), number


def test_what_was_written_just_before_the_start_has_not_changed_after_it(tmp_path):
    """Linux says in which hundredth of a second a process started, and it may be the same."""
    script = f"from {process_started_ns.__module__} import process_started_ns as f; print(f())"
    for number in range(5):
        (tmp_path / f"{number}").touch()
        shown = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
        assert int(shown.stdout) >= (tmp_path / f"{number}").stat().st_ctime_ns


@pytest.mark.parametrize("how", ["edited", "linked"])
def test_a_file_that_changes_while_it_is_read_is_a_doubt_and_not_kept(model, kept, how):
    path = model / "model.safetensors"
    if how == "linked":
        path.rename(model / "weights")
        path.symlink_to("weights")
    wait_for_a_tick()
    asked = []

    def change() -> bool:
        asked.append(None)
        if len(asked) == 3 and how == "edited":  # a chunk was read
            edit(path, 0, b"?")
        elif len(asked) == 3:
            path.unlink()
            path.symlink_to("config.json")
        return False

    found = digests(kept, threads=1).digest(ModelPlace(str(path)), change)
    assert found is not None
    assert found.doubts == (f"{str(path)!r} changed while it was read",)
    assert digest(kept, path).read_bytes == path.stat().st_size


def make_deep(model: Path) -> None:
    folder = model.joinpath(*("x" * 40))
    folder.mkdir(parents=True)
    (folder / "x").touch()


def make_many(model: Path) -> None:
    for number in range(model_files.NUM_FILES_MAX):
        (model / f"{number}").touch()


ABSURD = {
    "broken' cannot be read: No such file": lambda model: (model / "broken").symlink_to("nowhere"),
    "circle' cannot be read: Too many levels": lambda model: (model / "circle").symlink_to(
        "circle"
    ),
    "pipe' is not a regular file": lambda model: os.mkfifo(model / "pipe"),
    "too many files or folders": make_deep,
    "has too many files or folders for a model": make_many,
}


@pytest.mark.parametrize("words", ABSURD)
def test_an_absurd_folder_is_a_doubt(model, kept, monkeypatch, words):
    monkeypatch.setattr(model_files, "NUM_FILES_MAX", 100)
    ABSURD[words](model)
    (doubt,) = doubts_of(model, kept)
    assert words in doubt


def test_a_file_that_cannot_be_read_is_a_doubt(model, kept):
    if not os.geteuid():
        pytest.skip("root can read everything")
    (model / "config.json").chmod(0)
    (doubt,) = doubts_of(model, kept)
    assert doubt.endswith("config.json' cannot be read: Permission denied")


def test_a_machine_without_threads_is_a_doubt(model, kept, monkeypatch):
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    found = digest(kept, model)
    assert found.digest == ""
    assert found.doubts == (f"the files of {str(model)!r} cannot be read: can't start new thread",)


def test_links_in_a_circle_of_folders_end(model, kept):
    (model / "self").symlink_to(".")
    (model / "below").mkdir()
    (model / "below" / "up").symlink_to("..")
    found = digest(kept, model)
    assert (found.num_files, found.doubts) == (4, ())


@pytest.mark.parametrize("by_s", [3600, -3600])
def test_a_clock_that_is_set_does_not_hide_that_a_file_changed(model, kept, monkeypatch, by_s):
    """What was written in this test was so after this process started."""
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + by_s * 1_000_000_000)
    found = FileDigests(str(kept)).digest(ModelPlace(str(model)), lambda: False)
    assert found is not None
    assert found.doubts != ()


def test_doubts_are_few_and_printable(tmp_path, kept):
    model = tmp_path / "model"
    model.mkdir()
    for number in range(20):
        (model / f"\x1b[2J\n{number}").symlink_to("nowhere")
    doubts = doubts_of(model, kept)
    assert len(doubts) == 5
    assert doubts[-1] == "and 16 more"
    assert all(doubt.isprintable() for doubt in doubts)


def _tell_start(pipe: Connection) -> None:
    pipe.send(process_started_ns())


def test_a_process_knows_when_it_started():
    before_ns = time.time_ns()
    with started(_tell_start) as (_, pipe):
        started_ns = pipe.recv()
    after_ns = time.time_ns()
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert before_ns - 2 * tick_ns <= started_ns <= after_ns
