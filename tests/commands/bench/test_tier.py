"""`safe-offload bench tier`: what is measured, what is told, and that nothing is left."""

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from safe_offload.commands.bench import tier, tier_place
from safe_offload.commands.bench.tier_limits import SocketLimit, StoreLimit
from safe_offload.commands.cli import main
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers.base import Buffers
from safe_offload.tiers.naming import DESCRIPTION_FILE
from safe_offload.tiers.objects.bucket import open_store
from safe_offload.tiers.valkey.commands import EVERY, allowing
from tests.tiers.files.mounts import mounted
from tests.valkey_server import Server
from tests.worker.waiting import PATIENCE_S, wait_until

PATIENT = ("--timeout-s", "600")
SMALL = ("--object-bytes", "8KiB", "64KiB", "--round-bytes", "256KiB", "--rounds", "2", *PATIENT)
LONG = ("--object-bytes", "4KiB", "--round-bytes", "1MiB", "--rounds", "300", *PATIENT)
PASSWORD = "hunter2-secret"
ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def bench(*arguments: object) -> int:
    return main(["bench", "tier", *map(str, arguments)])


class Place:
    """Where tiers are, and what is there; `arguments`: of the command."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = tuple(map(str, arguments))

    def names(self) -> list[str]:
        raise NotImplementedError

    def is_begun(self) -> bool:
        """Whether objects have been written, and what they are."""
        names = self.names()
        return len(names) > 100 and any(DESCRIPTION_FILE in name for name in names)


class Directory(Place):
    def __init__(self, root: Path) -> None:
        root.mkdir()
        super().__init__(root)
        self.root = root

    def names(self) -> list[str]:
        return [str(path) for path in self.root.rglob("*")]


class Valkey(Place):
    def __init__(self, server: Server) -> None:
        super().__init__(f"redis://{server.host_port}")
        self.client = server.client()
        self.client.flushall()

    def names(self) -> list[str]:
        found: Any = self.client.keys()
        return sorted(map(bytes.decode, found))


class Bucket(Place):
    def __init__(self, url: str, endpoint: str) -> None:
        super().__init__(url, "--endpoint", endpoint)
        self.store: Any = open_store(TierConfig.at(url, endpoint=endpoint, timeout_s=600))

    def names(self) -> list[str]:
        return [meta["path"] for page in obstore.list(self.store) for meta in page]


@pytest.fixture(params=["directory", "server", "bucket"])
def place(request, tmp_path):
    if request.param == "directory":
        return Directory(tmp_path / "device")
    if request.param == "server":
        return Valkey(request.getfixturevalue("server"))
    bucket_server = request.getfixturevalue("bucket_server")
    return Bucket(bucket_server.url(tmp_path.name), bucket_server.endpoint)


@contextlib.contextmanager
def running(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which is killed in the end."""
    command = [sys.executable, "-m", "safe_offload", "bench", "tier", *map(str, arguments)]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **piped | options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ---- what is told ------------------------------------------------------------------------------


def test_every_way_of_every_size_is_told_and_nothing_is_left(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tier, "PROBED_KEYS", 40)
    figures = tmp_path / "figures.json"
    assert bench(*place.arguments, *SMALL, "--json", figures) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(figures.read_text())
    limit = found["sizes"][0]["limit"]
    for size in ("8.00 KiB", "64.00 KiB"):
        told = [line for line in lines if line.startswith(size)]
        ways = (f"{limit} writes", "tier writes", f"{limit} reads", "tier reads")
        assert all(any(way in line for line in told) for way in ways), lines
    assert any(line.startswith("a probe of 40 keys: ") for line in lines)
    assert [one["num_objects"] for one in found["sizes"]] == [32, 4]
    assert all(len(samples) == 2 for one in found["sizes"] for samples in one["samples"].values())
    assert place.names() == []


def test_what_will_be_written_is_told_before_and_true(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tier, "PROBED_KEYS", 40)
    place, held_bytes = Directory(tmp_path / "device"), []
    close = tier_place.Folder.close

    def see_close(self: Any) -> None:
        files = (path for path in place.root.rglob("*") if path.is_file())
        held_bytes.append(sum(path.stat().st_size for path in files))
        close(self)

    monkeypatch.setattr(tier_place.Folder, "close", see_close)
    assert bench(*place.arguments, *SMALL) == 0
    words = re.search(r"^Writes ([\d.]+) MiB, at most ([\d.]+) MiB", capsys.readouterr().err)
    assert words
    assert words[1] == words[2]
    assert float(words[1]) == pytest.approx(held_bytes[0] / (1 << 20), abs=0.02)


def test_progress_is_shown_on_a_terminal(tmp_path):
    place = Directory(tmp_path / "device")
    ours, theirs = pty.openpty()
    with running(*place.arguments, *LONG, stderr=theirs):
        os.close(theirs)
        seen = b""
        while b"measuring: " not in seen:
            seen += os.read(ours, 4096)
    os.close(ours)


def test_it_needs_neither_torch_nor_vllm(tmp_path):
    script = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        assert name.split(".")[0] not in ("torch", "vllm", "tests"), name
sys.meta_path.insert(0, Refuse())
from safe_offload.commands.cli import main
sys.exit(main(["bench", "tier", *sys.argv[1:]]))
"""
    place = Directory(tmp_path / "device")
    command = [sys.executable, "-c", script, *place.arguments, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tier reads" in done.stdout


# ---- nothing is left ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "number"),
    [("directory", each) for each in ENDINGS] + [(n, signal.SIGINT) for n in ("server", "bucket")],
    indirect=["place"],
)
def test_a_signal_in_the_middle_leaves_nothing(place, number):
    with running(*place.arguments, *LONG) as process:
        wait_until(place.is_begun)
        process.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert told.splitlines()[-1] == f"Ended by {number.name}; written objects are deleted."
    assert place.names() == []


def test_a_second_signal_does_not_keep_it_from_deleting(tmp_path):
    place = Directory(tmp_path / "device")
    with running(*place.arguments, *LONG) as process:
        wait_until(lambda: len(place.names()) > 2000)
        process.send_signal(signal.SIGINT)
        for number in ENDINGS * 20:
            process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert place.names() == []


def test_what_a_killed_run_left_in_a_directory_the_next_one_deletes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tier, "PROBED_KEYS", 40)
    place = Directory(tmp_path / "device")
    (place.root / "mine").write_bytes(b"mine")
    with running(*place.arguments, *LONG) as process:
        wait_until(place.is_begun)
        assert bench(*place.arguments, *SMALL) == 1
        assert "another benchmark is running" in capsys.readouterr().err
        process.kill()
    assert len(place.names()) > 100
    assert bench(*place.arguments, *SMALL) == 0
    assert re.search(r"Deleting [\d.]+ .iB left by an earlier run", capsys.readouterr().err)
    assert place.names() == [str(place.root / "mine")]


@pytest.mark.parametrize("place", ["server", "bucket"], indirect=True)
def test_what_a_killed_run_left_elsewhere_the_command_removes_that_it_has_told(place, capsys):
    with running(*place.arguments, *LONG) as process:
        wait_until(place.is_begun)
        process.kill()
        _, told = process.communicate()
    options = place.arguments[1:]
    assert main(["cache", "ls", *place.arguments]) == 0
    assert tier_place.MODEL in capsys.readouterr().out
    command = re.search(r"`safe-offload (cache rm .*?)`", told)
    assert command
    assert main([*command[1].split(), *options]) == 0
    assert place.names() == []


def test_what_is_written_to_a_server_expires(server):
    place = Valkey(server)
    with running(*place.arguments, *LONG) as process:
        wait_until(place.is_begun)
        process.kill()
    times = [place.client.ttl(name) for name in place.names()]
    assert all(0 < each <= tier_place.TTL_S for each in times)


def test_a_full_server_ends_it_with_an_error_and_nothing_is_left(tmp_path, capsys):
    options = {"maxmemory": "5mb", "maxmemory-policy": "noeviction"}
    with Server(tmp_path / "server", options) as server:
        place = Valkey(server)
        assert bench(*place.arguments, "--round-bytes", "16MiB") == 1
        assert "could not be written: full. Fix: free space" in capsys.readouterr().err
        assert place.names() == []


def test_the_user_of_an_engine_may_run_it(server, tmp_path):
    """It has DEL, and not UNLINK."""
    place, password = Valkey(server), tmp_path / "password"
    password.write_text(PASSWORD)
    allowed = f"on >{PASSWORD} ~safe-offload:* {allowing(EVERY)}"
    place.client.execute_command("ACL", "SETUSER", "engine", *allowed.split())
    url = f"redis://engine@{server.host_port}"
    assert bench(url, "--password-file", password, *SMALL) == 0
    assert place.names() == []


def send(*numbers: int) -> None:
    """Send signals to this process; their handlers have run when this returns."""
    for number in numbers:
        os.kill(os.getpid(), number)


def test_a_signal_waits_until_what_is_held_has_ended():
    done = []
    with (
        tier_place.Signals() as signals,
        pytest.raises(tier_place.EndedError) as ended,
        signals.held(),
    ):
        done.append(send(signal.SIGTERM, signal.SIGINT))
    assert (done, ended.value.number) == ([None], signal.SIGTERM)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, tier.new_event_loop])
def test_a_signal_cancels_what_runs_in_an_event_loop_and_is_raised_when_it_has_ended(make_loop):
    done = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(send, signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("ended")

    with (
        asyncio.Runner(loop_factory=make_loop) as runner,
        tier_place.Signals() as signals,
        pytest.raises(tier_place.EndedError),
    ):
        signals.run(runner, work())
    assert done == ["ended"]


class Doubtful(tier_place.Folder):
    """A signal comes while it is taken, or while it is emptied."""

    sends_in = ""

    def take(self) -> None:
        if self.sends_in == "take":
            send(signal.SIGTERM)
        super().take()

    def close(self) -> None:
        if self.sends_in == "close":
            send(signal.SIGTERM)
        super().close()


@pytest.mark.parametrize("moment", ["take", "close"])
def test_a_signal_while_a_folder_is_made_or_deleted_leaves_none(tmp_path, moment):
    place = Doubtful(TierConfig.at(f"file://{tmp_path}"))
    place.sends_in = moment
    with (
        tier_place.Signals() as signals,
        pytest.raises(tier_place.EndedError),
        tier_place.taken(place, 0, signals),
    ):
        (tmp_path / tier_place.FOLDER / "tier").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_signals_are_as_before_when_it_has_ended():
    before = [signal.getsignal(number) for number in ENDINGS]
    with tier_place.Signals(), contextlib.suppress(tier_place.EndedError):
        send(signal.SIGTERM)
    assert [signal.getsignal(number) for number in ENDINGS] == before


# ---- what is refused ---------------------------------------------------------------------------


def test_too_little_room_is_refused_before_anything_is_written(tmp_path, capsys):
    with mounted(tmp_path / "mnt", "tmpfs", 4 << 20) as folder:
        assert bench(folder, *LONG) == 1
        assert "4.00 MiB free, and the benchmark needs" in capsys.readouterr().err
        assert list(folder.iterdir()) == []


def test_a_folder_of_its_name_that_is_not_its_own_is_left_alone(tmp_path, capsys):
    folder = tmp_path / tier_place.FOLDER
    folder.mkdir()
    (folder / "mine").write_bytes(b"mine")
    assert bench(tmp_path, *SMALL) == 1
    assert "was not created by this benchmark. Fix: " in capsys.readouterr().err
    assert (folder / "mine").exists()
    (folder / "mine").unlink()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert bench(tmp_path, *SMALL) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "/nowhere is not a directory. Fix: create it"),
        (["/tmp", "--rounds", "0"], "--rounds: expected at least 1"),
        (["/tmp", "--object-bytes", "5000"], "--object-bytes: expected a multiple of"),
        (["/tmp", "--password-file", "/x"], "password_file"),
        (["unix:///nowhere"], "Fix: "),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments, message, capsys):
    assert bench(*arguments) == 1
    assert message in capsys.readouterr().err


# ---- limits ------------------------------------------------------------------------------------


def make_slots(count: int = 3, size_bytes: int = 300_000) -> list[Buffers]:
    memory = memoryview(bytearray(os.urandom(count * size_bytes)))
    return [(memory[i * size_bytes : (i + 1) * size_bytes],) for i in range(count)]


@pytest.mark.parametrize("is_unix", [True, False], ids=["unix", "tcp"])
def test_the_other_end_of_a_socket_takes_and_sends_every_byte(is_unix):
    slots = make_slots()
    written = [bytes(slot[0]) for slot in slots]
    limit = SocketLimit(slots, 2, is_unix=is_unix)
    try:
        limit.write(0)
        for slot in slots:
            slot[0][:] = bytes(slot[0].nbytes)
        limit.read(0)
        assert [bytes(slot[0]) for slot in slots] == written
    finally:
        limit.close()


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_a_store_is_written_and_read_by_its_library_alone(place):
    config = TierConfig.at(place.arguments[0], endpoint=place.arguments[2])
    limit = StoreLimit(config, make_slots(), lambda n: [f"{n}/{i}" for i in range(3)], asyncio.run)
    limit.write(0)
    limit.write(1)
    limit.read(1)
    assert sorted(place.names()) == [f"{n}/{i}" for n in range(2) for i in range(3)]
    for name in place.names():
        obstore.put(place.store, name, b"short")
    with pytest.raises(SafeOffloadError, match="read 5 of 300000 bytes"):
        limit.read(1)
    limit.close()
    obstore.delete(place.store, place.names())
